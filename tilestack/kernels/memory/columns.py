"""Summing down columns in a fixed order: the second half of every weight gradient.

lines ↓  +----+----+----+
         | 0  | 1  | 2  |   each program owns a strip of columns and adds the lines of its share;
         +----+----+----+   many lines are first cut into as many shares as the GPU can work on at once,
         | 0  | 1  | 2  |   and the shares' sums are summed again
         +----+----+----+
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.tiles import cdiv, multiprocessors, next_power

STRIP = 32  # columns a program owns when lines are few, or more where that would be
PROGRAMS = 16  # programs for each multiprocessor
FEW_LINES = 1024


@triton.jit
def column_sum_kernel(
    x_ptr, out_ptr,  # [matrices, lines, columns], [matrices, shares, columns]
    lines, columns, matrix_stride, line_stride,
    ACC: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    share, shares, matrix = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    line = tl.arange(0, LINES).to(tl.int64)[:, None]
    x_ptr += matrix * matrix_stride
    total = tl.zeros([LINES, COLS], ACC)
    for start in range(share * LINES, lines, shares * LINES):
        inside = (start + line < lines) & (column < columns)[None, :]
        total += tl.load(x_ptr + (start + line) * line_stride + column[None, :], mask=inside, other=0).to(ACC)
    out = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (matrix * shares + share) * columns + column, out, mask=column < columns)


def sum_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[matrices, lines, columns] → [matrices, columns] in a dtype, accumulated in float32 or better."""
    matrices, lines, columns = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    acc = tl.float64 if wide is torch.float64 else tl.float32
    if lines > FEW_LINES:
        strips = cdiv(columns, 256)
        shares = min(cdiv(lines, 16), max(1, 8 * multiprocessors(x.device) // strips))
        partial = torch.empty((matrices, shares, columns), dtype=wide, device=x.device)
        launch(
            column_sum_kernel,
            (strips, shares, matrices),
            x,
            partial,
            lines,
            columns,
            *x.stride()[:2],
            ACC=acc,
            LINES=16,
            COLS=256,
            num_warps=4,
        )
        x, lines = partial, shares
    out = torch.empty((matrices, columns), dtype=dtype, device=x.device)
    strip = max(STRIP, next_power(cdiv(columns, PROGRAMS * multiprocessors(x.device))))
    launch(
        column_sum_kernel,
        (cdiv(columns, strip), 1, matrices),
        x,
        out,
        lines,
        columns,
        *x.stride()[:2],
        ACC=acc,
        LINES=32,
        COLS=strip,
        num_warps=4,
    )
    return out
