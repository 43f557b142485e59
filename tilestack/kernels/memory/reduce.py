"""The sum over one dimension: along dense rows, or down dense columns, in one order whatever the run.

    rows      +---------------+ → Σ       columns   +---------------+
              | ROWS × COLS → |                     | LINES × COLS  |   a tile moves along what is summed and adds
              +---------------+                     |       ↓       |   up in place; one reduction at the end
                                                    +---------------+ → Σ

A sum does little but wait for memory. So the next tiles of a program are always on their way to shared memory, STAGES - 1
of them: left to itself, the assembler keeps registers low and loads one tile after the other.

Few long sums would leave most of the GPU idle. They are split into parts, each summed by a program of its own,

    x  [======part 0======|======part 1======|======part 2======]  →  partial [parts, outputs]  →  out

and the parts are summed by the columns kernel: two launches, no atomics.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, next_power, rows_of
from tilestack.ops.memory import reduce_sum_gradient

TILE = 2048  # elements of a tile
STAGES = 4  # a tile that is added, and those on their way
WAVES = 4  # programs per multiprocessor
SHORTEST_PART = 16384  # elements that are worth a program of their own
COLUMNS = 512  # of a tile that moves down
NARROW = 32  # of one where wide ones would be too few to occupy the GPU


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


@triton.jit
def sum_columns_kernel(
    x_ptr, out_ptr,
    lines, columns, part,
    ACC: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[p, b, column] = sum of x[b, p · part … (p + 1) · part - 1, column]; b and p are among the grid's axes."""
    column_tiles = tl.cdiv(columns, COLS)
    batch = (tl.program_id(0) // column_tiles).to(tl.int64)
    column = tl.program_id(0) % column_tiles * COLS + tl.arange(0, COLS)
    line = tl.arange(0, LINES).to(tl.int64)[None, :]
    start = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(start + part, lines)
    x_ptr += batch * lines * columns + line * columns + column[:, None]
    total = tl.zeros([COLS, LINES], ACC)
    for first in tl.range(start, end, LINES, num_stages=STAGES):
        inside = (column < columns)[:, None] & (line < end - first)
        total += tl.load(x_ptr + first * columns, mask=inside, other=0).to(ACC)
    batches = tl.num_programs(0) // column_tiles
    out_ptr += (tl.program_id(1).to(tl.int64) * batches + batch) * columns
    tl.store(out_ptr + column, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=column < columns)


def parts_of(length: int, step: int, programs: int, elements: int, x: Tensor) -> tuple[int, int]:
    """(parts, length of one, in whole steps) for sums that `programs` programs of `elements` each would do in one piece."""
    wanted = cdiv(WAVES * multiprocessors(x.device), max(programs, 1))
    parts = max(1, min(wanted, elements // SHORTEST_PART))
    part = cdiv(cdiv(max(length, 1), parts), step) * step
    return cdiv(max(length, 1), part), part


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


def sum_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums down the lines of a contiguous [batch, lines, columns], in a dtype."""
    batch, lines, columns = x.shape
    if columns and lines * columns >= SHORTEST_PART and (fold := folds(lines, columns)) > 1:
        folded = sum_columns(x.view(batch, lines // fold, fold * columns), widened(dtype))
        return sum_columns(folded.view(batch, fold, columns), dtype)
    few = lines * COLUMNS < 2 * SHORTEST_PART and batch * cdiv(columns, COLUMNS) < multiprocessors(x.device)
    width = min(next_power(max(columns, 1)), NARROW if few else COLUMNS)
    height = min(TILE // max(width, NARROW), next_power(max(lines, 1)))
    programs = batch * cdiv(columns, width)
    parts, part = parts_of(lines, height, programs, lines * min(columns, width), x)
    sums = torch.empty((parts, batch, columns), dtype=dtype if parts == 1 else widened(dtype), device=x.device)
    launch(
        sum_columns_kernel, (programs, parts), x, sums, lines, columns, part,
        ACC=accumulator(x.dtype), LINES=height, COLS=width, STAGES=min(STAGES, cdiv(part, height)), num_warps=4,
    )  # fmt: skip
    return sums if parts == 1 else sum_columns(sums.view(1, parts, batch * columns), dtype)


def folds(lines: int, columns: int) -> int:
    """How many short lines to read as one long one, first: as many as fill a tile's width and divide the lines."""
    return math.gcd(lines, 1 << max((COLUMNS // columns).bit_length() - 1, 0))


def widened(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@implements(ops.reduce_sum, backend="triton", backward=reduce_sum_gradient)
def reduce_sum(x: Tensor, dim: int) -> Tensor:
    dim %= x.ndim
    outer, inner = x.shape[:dim], x.shape[dim + 1 :]
    last = x.movedim(dim, -1)
    if math.prod(inner) == 1 or last.stride(-1) == 1:
        sums = sum_rows(rows_of(last))
    else:
        sums = sum_columns(x.contiguous().view(math.prod(outer), x.shape[dim], math.prod(inner)), x.dtype)
    return sums.view(outer + inner)
