"""Gathering rows by number, and its counterpart that puts rows back, adding those that share a place without atomics.

    gather    index   4 0 4 …          a tile of output rows reads each its own input row: dense along the row,
              out     ▤ ▤ ▤ …          anywhere across rows, so only the length of a row decides the bandwidth

    scatter   index          2 5 2 9   sorted, the inputs of each place lie together:
              sorted         2 2 5 9   place 2 reads inputs 0 and 2, place 5 input 1, place 9 input 3,
              input          0 2 1 3   and the others write zeros

The sort is stable and each place adds its inputs one after the other, so the sum has one order. Where places have few
inputs a program takes several, whose first inputs are read together; where they have many, it takes one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import accumulator, cdiv, next_power

TILE = 4096  # elements of a gathering program
GATHERED_COLUMNS = 1024  # its columns
ACROSS = 2048  # bytes of a row in a scattering program
TOGETHER = 8  # inputs of one place added at once, after the first
STAGES = 4  # those that are added, those on their way, and the numbers of the next, where places have many inputs
PLACES = 4  # of a program where they have few,
FEW = 2  # on average fewer than this,
MANY = 16  # and many from here on
BLOCK = 256  # keys or bounds of a program


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
def scatter_keys_kernel(index_ptr, keys_ptr, count, rows, BLOCK: tl.constexpr):
    """What the inputs are sorted by: their places; -1 or `rows` where there is none."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + offset, mask=offset < count, other=0)
    key = tl.minimum(tl.maximum(index, -1), rows)
    tl.store(keys_ptr + offset, key.to(keys_ptr.dtype.element_ty), mask=offset < count)


@triton.jit
def scatter_bounds_kernel(sorted_ptr, bounds_ptr, count, rows, steps, BLOCK: tl.constexpr):
    """bounds[row] = how many of the sorted keys are smaller, found bit by bit, `steps` of them from the highest."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK], tl.int64)
    for step in range(steps):
        more = smaller + (1 << (steps - 1 - step))
        key = tl.load(sorted_ptr + more - 1, mask=more <= count, other=0)
        smaller = tl.where((more <= count) & (key < row), more, smaller)
    tl.store(bounds_ptr + row, smaller, mask=row <= rows)


@triton.jit
def scatter_rows_kernel(
    x_ptr, order_ptr, bounds_ptr, out_ptr,
    rows, columns, x_stride,
    ACC: tl.constexpr, PLACES: tl.constexpr, TOGETHER: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[row] = the sum of x[order[bounds[row] … bounds[row + 1] - 1]], for PLACES rows.

    The first inputs of all these rows are under way before one is added: most rows may have no other.
    """
    column_tiles = tl.cdiv(columns, COLS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * PLACES
    column = tl.program_id(0) % column_tiles * COLS + tl.arange(0, COLS)
    inside = column < columns
    bounds: tl.tuple = ()
    numbers: tl.tuple = ()
    firsts: tl.tuple = ()
    for i in tl.static_range(PLACES + 1):
        bounds += (tl.load(bounds_ptr + tl.minimum(row + i, rows)),)
    for i in tl.static_range(PLACES):
        numbers += (tl.load(order_ptr + bounds[i], mask=bounds[i] < bounds[i + 1], other=0),)
    for i in tl.static_range(PLACES):
        first = (bounds[i] < bounds[i + 1]) & inside
        firsts += (tl.load(x_ptr + numbers[i] * x_stride + column, mask=first, other=0),)
    for i in tl.static_range(PLACES):
        total, end = firsts[i].to(ACC), bounds[i + 1]
        for next in tl.range(bounds[i] + 1, end, TOGETHER, num_stages=STAGES):
            place = next + tl.arange(0, TOGETHER)[:, None]
            source = tl.load(order_ptr + place, mask=place < end, other=0)
            added = (place < end) & inside[None, :]
            x = tl.load(x_ptr + source * x_stride + column[None, :], mask=added, other=0)
            total += tl.sum(x.to(ACC), 0)
        target = out_ptr + (row + i) * columns + column
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside & (row + i < rows))


def as_rows(x: Tensor) -> Tensor:
    """x as a matrix with a dense line for each index of its first dimension; copied only if its strides demand it."""
    lines = x.flatten(1) if x.ndim > 1 else x[:, None]
    return lines if lines.stride(1) == 1 or lines.shape[1] == 1 else lines.contiguous()


def gathered(x: Tensor, index: Tensor) -> Tensor:
    source = as_rows(x)
    rows, columns = source.shape
    out = torch.empty((len(index), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = min(next_power(max(columns, 1)), GATHERED_COLUMNS)
    height = TILE // width
    grid = (cdiv(len(index), height) * cdiv(columns, width),)
    launch(
        gather_rows_kernel, grid, source, index.contiguous(), out, len(index), rows, columns, source.stride(0),
        ROWS=height, COLS=width, num_warps=4,
    )  # fmt: skip
    return out


def sorted_by_place(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the inputs in the order of their places, where in it those of each place begin and the last ones end)."""
    # A radix sort takes a pass for each byte of its keys.
    dtype = next(d for d in (torch.int8, torch.int16, torch.int32, torch.int64) if rows <= torch.iinfo(d).max)
    count, index = len(index), index.contiguous()
    keys = torch.empty(count, dtype=dtype, device=index.device)
    launch(scatter_keys_kernel, (cdiv(count, BLOCK),), index, keys, count, rows, BLOCK=BLOCK, num_warps=4)
    ordered, order = torch.sort(keys, stable=True)
    bounds = torch.empty(rows + 1, dtype=torch.int64, device=index.device)
    grid = (cdiv(rows + 1, BLOCK),)
    launch(scatter_bounds_kernel, grid, ordered, bounds, count, rows, count.bit_length(), BLOCK=BLOCK, num_warps=4)
    return order, bounds


def scattered(x: Tensor, index: Tensor, rows: int) -> Tensor:
    source = as_rows(x)
    columns = source.shape[1]
    out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    order, bounds = sorted_by_place(index, rows)
    width = min(next_power(max(columns, 1)), ACROSS // x.itemsize)
    warps = max(1, width * x.itemsize // 512)  # 16 bytes a thread
    places = PLACES if len(index) < FEW * rows else 1
    stages = STAGES if len(index) >= MANY * rows else 1
    launch(
        scatter_rows_kernel, (cdiv(rows, places) * cdiv(columns, width),), source, order, bounds, out,
        rows, columns, source.stride(0),
        ACC=accumulator(x.dtype), PLACES=places, TOGETHER=TOGETHER, COLS=width, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def gather_rows_backward(grad: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return scattered(grad, index, x.shape[0]), None


@implements(ops.gather_rows, backend="triton", invariant=True, repeat=straight_line, backward=gather_rows_backward)
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return gathered(x, index)


def scatter_rows_backward(grad: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return gathered(grad, index), None


@implements(ops.scatter_rows, backend="triton", repeat=straight_line, backward=scatter_rows_backward)
def scatter_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    return scattered(x, index, rows)
