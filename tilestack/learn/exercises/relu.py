"""A gradient is a second kernel: relu, forward and backward.

    forward     out = max(x, 0)                             torch.relu(x)
    backward    dx = grad where out > 0, and 0 elsewhere    torch.where(out <= 0, 0, grad)

    x     ─▶ ┌──────────┐ ─▶ out ──┐ kept until the backward: the sign of out says all that x could
             └──────────┘          ▼
    dx    ◀─ ┌──────────┐ ◀─────── out
             └──────────┘ ◀─────── grad, which arrives from the layers above

Two kernels, each over blocks as in `add`. What a backward names among its arguments is what the forward keeps in
memory meanwhile; this one asks for `out`, which the next layer keeps anyway, and not for `x`.

A NaN in x stays a NaN: a model that has diverged must not look healthy.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def relu_fwd_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # begin: yours
    # | # Yours: load a block of x, and store it with zeros for what is negative.
    # | pass
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.where(x < 0, 0.0, x), mask=offsets < n)
    # end


@triton.jit
def relu_bwd_kernel(grad_ptr, out_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    # begin: yours
    # | # Yours: load grad and out, and store grad where out is positive, 0 elsewhere.
    # | pass
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n)
    out = tl.load(out_ptr + offsets, mask=offsets < n)
    tl.store(dx_ptr + offsets, tl.where(out <= 0, 0.0, grad), mask=offsets < n)
    # end


def relu_backward(grad, out):
    grad, out = grad.contiguous(), out.contiguous()
    dx, n = torch.empty_like(grad), grad.numel()
    if n:
        relu_bwd_kernel[(triton.cdiv(n, 1024),)](grad, out, dx, n, BLOCK=1024)
    return dx


@implements(ops.relu, backend="mine", backward=relu_backward)
def relu(x):
    x = x.contiguous()
    out, n = torch.empty_like(x), x.numel()
    if n:
        relu_fwd_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out


# begin: tutor
HINTS = [
    "Both kernels have the offsets and the mask of `add`. `tl.where(condition, a, b)` chooses element by element.",
    "tl.maximum(x, 0.0) is right until x holds a NaN, which it replaces by 0. A comparison with NaN is false: arrange "
    "tl.where so that NaN ends in the branch that keeps x.",
    "Forward: tl.where(x < 0, 0.0, x). Backward: tl.where(out <= 0, 0.0, grad).",
]
MISTAKES = {
    "a NaN becomes 0, as `tl.maximum` makes it": lambda x: torch.where(x > 0, x, 0),
    "nothing is set to zero, as if relu(x) were x": lambda x: x,
    "the negative numbers are kept and the positive ones dropped": lambda x: torch.where(x < 0, x, 0),
}
# end
