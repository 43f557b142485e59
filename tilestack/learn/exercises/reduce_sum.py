"""A loop inside a program: sum long rows.

    out[r] = x[r, 0] + x[r, 1] + … + x[r, columns - 1]           in PyTorch: x.sum(-1)

A row may be longer than what a program can hold at once, so that the program goes through it in chunks, and keeps a
running sum for each place of the chunk. Only at the end are these added up:

    x[r]    ┌────────┬────────┬────────┬────────┬───┬ ·· ┐
            │ chunk  │ chunk  │ chunk  │ chunk  │   │    │
            └───┬────┴───┬────┴───┬────┴───┬────┴─┬─┴ ·· ┘
    sums   [ +  +  +  + ] one for each place of a chunk, in float32
                  └──▶ tl.sum: one number, row r of the result

Add up in float32 whatever x is. In float16, 2048 + 1 is 2048: a long sum would stop growing.

`range(0, columns, CHUNK)` is a loop whose end is known when the kernel runs.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def reduce_sum_kernel(x_ptr, out_ptr, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # begin: yours
    # | # Yours: a vector of CHUNK zeros; the chunks of the row added to it; its sum stored as element `row` of out.
    # | pass
    sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        sums += tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(sums, 0))
    # end


def reduce_sum_backward(grad, x, dim):
    return grad.unsqueeze(dim).expand(x.shape)


@implements(
    ops.reduce_sum, backend="mine", backward=reduce_sum_backward, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)
def reduce_sum(x, dim):
    rows = x.movedim(dim, -1).contiguous()
    out, columns = rows.new_empty(rows.shape[:-1]), rows.shape[-1]
    if out.numel():
        reduce_sum_kernel[(out.numel(),)](rows, out, columns, CHUNK=256)
    return out


# begin: tutor
HINTS = [
    "sums = tl.zeros((CHUNK,), tl.float32), then: for start in range(0, columns, CHUNK). Row r begins at r * columns.",
    "The columns of a chunk are start + tl.arange(0, CHUNK). What should a load give beyond the end, so that it adds "
    "nothing? `other=0.0`, and not what happens to be there.",
    "sums += tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32); after the loop "
    "tl.store(out_ptr + row, tl.sum(sums, 0)).",
]
MISTAKES = {
    "only the first chunk of 256 is added": lambda x, dim: x.narrow(dim, 0, min(256, x.shape[dim])).sum(dim),
    "the mean is taken": lambda x, dim: x.mean(dim),
    "every program sums the first row": (
        lambda x, dim: x.movedim(dim, -1).flatten(0, -2)[0].sum().expand(x.sum(dim).shape)
    ),
}
# end
