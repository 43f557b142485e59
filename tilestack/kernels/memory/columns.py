"""Summing down columns in one order whatever the run: half of `reduce_sum`, and the second half of every weight gradient.

lines ↓  +--------+--------+
         | LINES  |        |   a program owns a strip of columns; its tile moves down and adds up in place, the next
         | × COLS |        |   tiles being on their way to shared memory (left to itself, the assembler keeps registers
         |   ↓    |   ↓    |   low and loads one tile after the other); one reduction at the end
         +--------+--------+

Few strips of many lines would leave most of the GPU idle. The lines are then split into parts, each summed by a program of
its own, and the parts are summed in turn: two launches, no atomics. Lines shorter than a tile is wide are first read as
fewer, longer ones, which are summed, and then what lies side by side.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, next_power, widened

TILE = 2048  # elements of a tile
STAGES = 4  # a tile that is added, and those on their way
WAVES = 4  # programs per multiprocessor
SHORTEST_PART = 16384  # elements that are worth a program of their own
WIDEST_STRIP, NARROWEST_STRIP = 512, 32  # columns
FEW_LINES = 1024  # up to so many, a second launch costs more than it brings


@triton.jit
def sum_columns_kernel(
    x_ptr, out_ptr,
    lines, columns, matrix_stride, line_stride, part,
    ACC: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[p, m, column] = sum of x[m, p · part … (p + 1) · part - 1, column]; m and p are among the grid's axes."""
    column_tiles = tl.cdiv(columns, COLS)
    matrix = (tl.program_id(0) // column_tiles).to(tl.int64)
    column = tl.program_id(0) % column_tiles * COLS + tl.arange(0, COLS)
    line = tl.arange(0, LINES).to(tl.int64)[None, :]
    start = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(start + part, lines)
    x_ptr += matrix * matrix_stride + line * line_stride + column[:, None]
    total = tl.zeros([COLS, LINES], ACC)
    for first in tl.range(start, end, LINES, num_stages=STAGES):
        inside = (column < columns)[:, None] & (line < end - first)
        total += tl.load(x_ptr + first * line_stride, mask=inside, other=0).to(ACC)
    matrices = tl.num_programs(0) // column_tiles
    out_ptr += (tl.program_id(1).to(tl.int64) * matrices + matrix) * columns
    tl.store(out_ptr + column, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=column < columns)


def parts_of(length: int, step: int, programs: int, elements: int, x: Tensor) -> tuple[int, int]:
    """(parts, length of one, in whole steps) for sums that `programs` programs of `elements` each would do in one piece."""
    wanted = cdiv(WAVES * multiprocessors(x.device), max(programs, 1))
    parts = max(1, min(wanted, elements // SHORTEST_PART))
    part = cdiv(cdiv(max(length, 1), parts), step) * step
    return cdiv(max(length, 1), part), part


def sum_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[matrices, lines, columns] → [matrices, columns] in a dtype, accumulated in float32 or better; columns are dense."""
    matrices, lines, columns = x.shape
    few = lines <= FEW_LINES
    if columns and not few and x.is_contiguous() and (fold := folds(lines, columns)) > 1:
        folded = sum_columns(x.view(matrices, lines // fold, fold * columns), widened(dtype))
        return sum_columns(folded.view(matrices, fold, columns), dtype)
    share = cdiv(matrices * columns, WAVES * multiprocessors(x.device)) if few else columns
    width = min(max(next_power(share), NARROWEST_STRIP), WIDEST_STRIP, next_power(max(columns, 1)))
    height = min(TILE // width, next_power(max(lines, 1)))
    programs = matrices * cdiv(columns, width)
    parts, part = (1, lines) if few else parts_of(lines, height, programs, lines * min(columns, width), x)
    sums = torch.empty((parts, matrices, columns), dtype=dtype if parts == 1 else widened(dtype), device=x.device)
    launch(
        sum_columns_kernel, (programs, parts), x, sums, lines, columns, *x.stride()[:2], part,
        ACC=accumulator(x.dtype), LINES=height, COLS=width, STAGES=max(min(STAGES, cdiv(part, height)), 1), num_warps=4,
    )  # fmt: skip
    return (
        sums[0] if parts == 1 else sum_columns(sums.view(1, parts, matrices * columns), dtype).view(matrices, columns)
    )


def folds(lines: int, columns: int) -> int:
    """How many short lines to read as one long one, first: as many as fill a tile's width and divide the lines."""
    return math.gcd(lines, 1 << max((WIDEST_STRIP // columns).bit_length() - 1, 0))
