"""Find the bug: a copy that is right for 1024 elements, and not for 33.

    out[i] = x[i]                              in PyTorch: x.clone()

Somebody wrote this kernel, tried it on 1024 elements and was content. Nothing is missing in it, and one thing is
wrong. Read it, think of the last program of a vector of 33 elements, and mend it:

    element    0 …            31   32  33 …                1023
              ┌─────────────────┬─────┬──────────────────────┐
    program 0 │    32 whole     │  1  │  does not exist      │
              └─────────────────┴─────┴──────────────────────┘

Such a bug may stay unseen for years: beyond a tensor there is often other memory of yours, and reading it hurts
nobody. Until it does. The check puts forbidden ground around every tensor.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # begin: yours
    # | inside = offsets <= n
    inside = offsets < n
    # end
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x, mask=inside)


def copy_backward(grad):
    return grad


@implements(ops.copy, backend="mine", backward=copy_backward)
def copy(x):
    x = x.contiguous()
    out, n = torch.empty_like(x), x.numel()
    if n:
        copy_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out


# begin: tutor
HINTS = [
    "Which offsets does the last program have, and for which of them is `inside` true?",
    "The elements of n are 0 … n - 1. Put n itself into the condition of the mask.",
    "`offsets <= n` lets element n through, one beyond the last. It must be `offsets < n`.",
]
# end
