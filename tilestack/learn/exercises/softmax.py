"""Two reductions without leaving the registers: softmax of a row.

    top = max of the row
    out[c] = exp(x[c] - top) / sum over the row of exp(x[c] - top)          torch.softmax(x, dim)

PyTorch operators one by one would go through memory five times. A program that holds the whole row reads it
once and writes it once:

    memory    x[r] ──read──▶ ┌──────────────────────────────────────┐ ──write──▶ out[r]
                             │ registers: max, subtract, exp, sum, /│
                             └──────────────────────────────────────┘

Why subtract the maximum? exp(89) is more than a float32 can hold. The quotient is the same for any shift.

WIDTH is the power of two from `columns` on, so that some places of the block do not exist. `tl.max` and `tl.sum` see
these as well: what a load fills in there (`other=`) must not win the maximum, nor count in the sum.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # begin: yours
    # | # Yours: load row `row` in float32; its maximum, the exponentials and their sum; store the quotient.
    # | pass
    column = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, exponential / tl.sum(exponential, 0), mask=column < columns)
    # end


@implements(ops.softmax, backend="mine", dtypes=[torch.float16, torch.bfloat16, torch.float32])
def softmax(x, dim):
    rows = x.movedim(dim, -1).contiguous()
    out, columns = torch.empty_like(rows), rows.shape[-1]
    if rows.numel():
        softmax_kernel[(rows.numel() // columns,)](rows, out, columns, WIDTH=triton.next_power_of_2(columns))
    return out.movedim(-1, dim).contiguous()


# begin: tutor
def filled_with_zeros(x, dim):
    rows = x.movedim(dim, -1)
    columns = rows.shape[-1]
    wider = torch.nn.functional.pad(rows, (0, triton.next_power_of_2(columns) - columns))
    return torch.softmax(wider, -1)[..., :columns].movedim(-1, dim)


HINTS = [
    "column = tl.arange(0, WIDTH); the row begins at row * columns. `tl.max(x, 0)` and `tl.sum(x, 0)` reduce a vector.",
    'Load with other=-float("inf"): it is no maximum, and exp(-inf) is 0, which adds nothing to the sum.',
    "exponential = tl.exp(x - tl.max(x, 0)); store exponential / tl.sum(exponential, 0) under the mask.",
]
MISTAKES = {
    "the places beyond the row count as scores of 0: see `other`": filled_with_zeros,
    "the exponentials are not divided by their sum": lambda x, dim: torch.exp(x - x.amax(dim, keepdim=True)),
    "the sum is that of the scores, not of their exponentials": (
        lambda x, dim: torch.exp(x - x.amax(dim, keepdim=True)) / x.sum(dim, keepdim=True)
    ),
}
# end
