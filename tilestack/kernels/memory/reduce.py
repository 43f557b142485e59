"""The sum over one dimension: along dense rows here, down dense columns in `columns.py`, in one order whatever the run.

    +---------------+ → Σ     a tile moves along what is summed and adds up in place, the next ones being on their way to
    | ROWS × COLS → |         shared memory; one reduction at the end
    +---------------+

Few long sums would leave most of the GPU idle. They are split into parts, each summed by a program of its own,

    x  [======part 0======|======part 1======|======part 2======]  →  partial [parts, outputs]  →  out

and the parts are summed down columns: two launches, no atomics.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.memory.columns import STAGES, TILE, parts_of, sum_columns
from tilestack.kernels.tiles import accumulator, cdiv, next_power, rows_of, widened
from tilestack.ops.memory import reduce_sum_gradient


@triton.jit
def sum_rows_kernel(
    x_ptr, out_ptr,
    rows, columns, x_stride, part,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[p, row] = sum of x[row, p · part … (p + 1) · part - 1], p being the second grid axis."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)[None, :]
    start = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(start + part, columns)
    x_ptr += row[:, None] * x_stride + column
    total = tl.zeros([ROWS, COLS], ACC)
    for first in tl.range(start, end, COLS, num_stages=STAGES):
        inside = (column < end - first) & (row < rows)[:, None]
        total += tl.load(x_ptr + first, mask=inside, other=0).to(ACC)
    target = out_ptr + tl.program_id(1).to(tl.int64) * rows + row
    tl.store(target, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=row < rows)


def sum_rows(x: Tensor) -> Tensor:
    """Sums of the rows of a matrix, each row dense."""
    rows, columns = x.shape
    width = min(next_power(max(columns, 1)), TILE)
    height = TILE // width
    programs = cdiv(rows, height)
    parts, part = parts_of(columns, width, programs, height * columns, x)
    sums = torch.empty((parts, rows), dtype=x.dtype if parts == 1 else widened(x.dtype), device=x.device)
    launch(
        sum_rows_kernel, (programs, parts), x, sums, rows, columns, x.stride(0), part,
        ACC=accumulator(x.dtype), ROWS=height, COLS=width, STAGES=min(STAGES, cdiv(part, width)), num_warps=4,
    )  # fmt: skip
    return sums if parts == 1 else sum_columns(sums[None], x.dtype)


@implements(ops.reduce_sum, backend="triton", repeat=straight_line, backward=reduce_sum_gradient)
def reduce_sum(x: Tensor, dim: int) -> Tensor:
    dim %= x.ndim
    outer, inner = x.shape[:dim], x.shape[dim + 1 :]
    last = x.movedim(dim, -1)
    if math.prod(inner) == 1 or last.stride(-1) == 1:
        sums = sum_rows(rows_of(last))
    else:
        sums = sum_columns(x.contiguous().view(math.prod(outer), x.shape[dim], math.prod(inner)), x.dtype)
    return sums.view(outer + inner)
