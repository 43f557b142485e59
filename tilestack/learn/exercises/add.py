"""Programs, blocks and masks: add two vectors.

    out[i] = x[i] + y[i]                       in PyTorch: x + y

A GPU runs one function, the kernel, many times at once. Each run is a program and handles one block of
elements, here of 8 so that they fit on a line; below it is 1024:

    element    0 … 7    8 … 15   16 … 21 22 23
              ┌───────┐┌───────┐┌───────┬─────┐
    program   │   0   ││   1   ││   2   │ ··· │   22 elements: the last two places of program 2 do not exist
              └───────┘└───────┘└───────┴─────┘

A program knows its number, `tl.program_id(0)`, and computes from it which elements are its own. `x_ptr` is the
address of x[0], `x_ptr + offsets` a block of addresses. What lies beyond the end must be neither read nor
written, which is what the `mask` of `tl.load` and `tl.store` is for.

The launcher is given: it allocates the result and starts enough programs. The gradient is given, too.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # begin: yours
    # | # Yours: which elements are this program's? Load them from x and from y, and store their sum.
    # | pass
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x + y, mask=inside)
    # end


def add_backward(grad):
    return grad, grad


@implements(ops.add, backend="mine", backward=add_backward)
def add(x, y):
    x, y = x.contiguous(), y.contiguous()
    out, n = torch.empty_like(x), x.numel()
    if n:
        add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    return out


# begin: tutor
HINTS = [
    "`tl.arange(0, BLOCK)` is the block 0, 1, …, BLOCK - 1. Program 0 needs just that; what does program 1 add to it?",
    "Program p has the elements from p * BLOCK on: offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK). "
    "(`.to(tl.int64)` on the program's number keeps offsets beyond two billion right.)",
    "An element exists where offsets < n. x = tl.load(x_ptr + offsets, mask=offsets < n), likewise y; then "
    "tl.store(out_ptr + offsets, x + y, mask=offsets < n).",
]
MISTAKES = {
    "only x is stored": lambda x, y: x + 0 * y,
    "the two are multiplied": lambda x, y: x * y,
    "the second is subtracted": lambda x, y: x - y,
}
# end
