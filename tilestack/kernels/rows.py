"""Gathering rows by number, and its counterpart that puts rows back, adding those that share a place without atomics.

    gather    index   4 0 4 …          a tile of output rows reads each its own input row: dense along the row,
              out     ▤ ▤ ▤ …          anywhere across rows, so only the length of a row decides the bandwidth

    scatter   index          2 5 2 9   sorted, the inputs of each place lie together:
              sorted         2 2 5 9   place 2 reads inputs 0 and 2, place 5 input 1, place 9 input 3,
              input          0 2 1 3   and the others write zeros

The sort is stable and each place adds its inputs by itself, so the sum has one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.launch import accumulator, cdiv, launch, next_power
from tilestack.kernels.repeat import straight_line
from tilestack.ops import implements

TILE = 4096  # elements of a gathering program
WIDEST = 1024  # columns of a program
TOGETHER = 8  # inputs of one place added at once, after the first


@triton.jit
def gather_rows_kernel(
    x_ptr, index_ptr, out_ptr,
    count, rows, columns, x_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, COLS)
    place = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % column_tiles * COLS + tl.arange(0, COLS))[None, :]
    row = tl.load(index_ptr + place, mask=place < count, other=0).to(tl.int64)[:, None]
    place = place[:, None]
    inside = (place < count) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside & (row >= 0) & (row < rows), other=0)
    if x.dtype.is_floating():
        x = tl.where((row >= 0) & (row < rows), x, float("nan")).to(x.dtype)
    tl.store(out_ptr + place * columns + column, x, mask=inside)


@triton.jit
def scatter_rows_kernel(
    x_ptr, order_ptr, bounds_ptr, out_ptr,
    columns, x_stride,
    ACC: tl.constexpr, TOGETHER: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, COLS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64)
    column = tl.program_id(0) % column_tiles * COLS + tl.arange(0, COLS)
    start = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    first = tl.load(order_ptr + start, mask=start < end, other=0)
    total = tl.load(x_ptr + first * x_stride + column, mask=(start < end) & (column < columns), other=0).to(ACC)
    for next in range(start + 1, end, TOGETHER):
        place = next + tl.arange(0, TOGETHER)[:, None]
        source = tl.load(order_ptr + place, mask=place < end, other=0)
        inside = (place < end) & (column < columns)[None, :]
        total += tl.sum(tl.load(x_ptr + source * x_stride + column[None, :], mask=inside, other=0).to(ACC), 0)
    tl.store(out_ptr + row * columns + column, total.to(out_ptr.dtype.element_ty), mask=column < columns)


def as_rows(x: Tensor) -> Tensor:
    """x as a matrix with a dense line for each index of its first dimension; copied only if its strides demand it."""
    lines = x.flatten(1) if x.ndim > 1 else x[:, None]
    return lines if lines.stride(1) == 1 or lines.shape[1] == 1 else lines.contiguous()


def gathered(x: Tensor, index: Tensor) -> Tensor:
    source = as_rows(x)
    rows, columns = source.shape
    out = torch.empty((len(index), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = min(next_power(max(columns, 1)), WIDEST)
    height = TILE // width
    grid = (cdiv(len(index), height) * cdiv(columns, width),)
    launch(
        gather_rows_kernel, grid, source, index.contiguous(), out, len(index), rows, columns, source.stride(0),
        ROWS=height, COLS=width, num_warps=4,
    )  # fmt: skip
    return out


def scattered(x: Tensor, index: Tensor, rows: int) -> Tensor:
    source = as_rows(x)
    columns = source.shape[1]
    out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    ordered, order = torch.sort(index, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(rows + 1, dtype=index.dtype, device=index.device))
    width = min(next_power(max(columns, 1)), WIDEST)
    launch(
        scatter_rows_kernel, (rows * cdiv(columns, width),), source, order, bounds, out, columns, source.stride(0),
        ACC=accumulator(x.dtype), TOGETHER=TOGETHER, COLS=width, num_warps=4,
    )  # fmt: skip
    return out


def gather_rows_backward(grad: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return scattered(grad, index, x.shape[0]), None


@implements(ops.gather_rows, backend="triton", repeat=straight_line, backward=gather_rows_backward)
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return gathered(x, index)


def scatter_rows_backward(grad: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return gathered(grad, index), None


@implements(ops.scatter_rows, backend="triton", repeat=straight_line, backward=scatter_rows_backward)
def scatter_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    return scattered(x, index, rows)
