"""A row and a vector that all rows share: RMS norm.

    out[r, c] = x[r, c] / sqrt(mean over c of x[r, c]² + eps) * weight[c]             torch.nn.functional.rms_norm

              columns
            ┌─────────────────────┐
    program │ x[r]                │──▶ mean of squares ──▶ 1 / sqrt(… + eps), one number
       r    └─────────────────────┘                            │
            ┌─────────────────────┐                            ▼
    all     │ weight              │──────────────────▶ x[r] · number · weight ──▶ out[r]
            └─────────────────────┘

It is `softmax` once more, a row in registers, with a sum instead of a maximum, and with a second operand: every program
loads the same weight, which from the second program on comes out of the cache.

The mean is over the `columns` that exist, not over the WIDTH places of the block. `weight` may be None: then
HAS_WEIGHT is False, and the compiler leaves out what is behind `if HAS_WEIGHT`. Computing is done in float32.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def rms_norm_fwd_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # begin: yours
    # | # Yours: the row in float32, its mean of squares, `tl.rsqrt` of that plus eps; times weight if there is one.
    # | pass
    column = tl.arange(0, WIDTH)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * columns + column, out, mask=inside)
    # end


@implements(ops.rms_norm, backend="mine", dtypes=[torch.float16, torch.bfloat16, torch.float32])
def rms_norm(x, weight, eps):
    x = x.contiguous()
    weight = weight if weight is None else weight.contiguous()
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    out, columns = torch.empty_like(x, dtype=dtype), x.shape[-1]
    if x.numel():
        rms_norm_fwd_kernel[(x.numel() // columns,)](
            x, weight, out, columns, eps, HAS_WEIGHT=weight is not None, WIDTH=triton.next_power_of_2(columns)
        )
    return out


# begin: tutor
HINTS = [
    "Load the row with other=0.0: zeros add nothing to the sum of squares.",
    "tl.sum(x * x, 0) / columns is the mean of squares; the scale of the row is tl.rsqrt(that + eps).",
    "out = x * scale; if HAS_WEIGHT: out *= tl.load(weight_ptr + column, mask=inside).to(tl.float32). The weight's "
    "address has no row in it.",
]


def scaled(x, weight, scale):
    return x * scale * (1 if weight is None else weight)


def squares(x):
    return x.square().sum(-1, keepdim=True)


MISTAKES = {
    "the sum of squares is taken for their mean": (
        lambda x, weight, eps: scaled(x, weight, torch.rsqrt(squares(x) + eps))
    ),
    "the mean is over WIDTH, and not over `columns`": (
        lambda x, weight, eps: scaled(x, weight, torch.rsqrt(squares(x) / triton.next_power_of_2(x.shape[-1]) + eps))
    ),
    "the weight is left out": lambda x, eps: x * torch.rsqrt(squares(x) / x.shape[-1] + eps),
    "the row is multiplied by its root mean square, not divided by it": (
        lambda x, weight, eps: scaled(x, weight, torch.sqrt(squares(x) / x.shape[-1] + eps))
    ),
}
# end
