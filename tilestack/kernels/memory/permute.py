"""Copy, strided copy, transpose and permute: four operators, one job, which is to write a strided view densely.

The output is written in order, so a view is known by its sizes and the input's strides. Neighbouring dimensions that lie
as one in the input are merged first; what is left decides how memory is walked:

    flat      one dimension: blocks of a vector; where its stride is 1, every access is 16 bytes wide
    tiled     rows × columns of the output, columns being its last dimension and so dense in the output; rows are
              either another long dimension, or, where the columns are not dense in the input, the one that is:

                  input (rows dense)      shared memory         output (columns dense)
                  +--+--+--+--+           +--+--+--+--+         +--+--+--+--+
                  | >>>>>>>>> | read  →   | turned    |   →     | >>>>>>>>> | written
                  | >>>>>>>>> | densely   | by trans  |         | >>>>>>>>> | densely
                  +--+--+--+--+           +--+--+--+--+         +--+--+--+--+

              the other dimensions are an outer batch, taken apart from the program's number
    decoded   dimensions too small to fill a tile: each output element finds its input by division

A tile has TILE_BYTES. The compiler stages it through shared memory in a swizzled order, free of bank conflicts.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.implementation import FLOATS
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.vectors import block_of
from tilestack.kernels.tiles import cdiv, next_power, rows_of
from tilestack.ops.memory import copy_gradient, permute_gradient, transpose_gradient

FLAT_BYTES = 2048  # of a vector per program
SPREAD_BYTES, SPREAD_WARPS = 4096, 4  # of the gradient with zeros between
GRANULE = 16  # bytes that a thread moves at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
TILE_BYTES = 16384
TILE_ELEMENTS = 8192  # of which a thread holds no more addresses than it has registers
TILE_SIDE = 128  # bytes of a dense run on either side of a turned tile, where the view has so many
SMALLEST_TILE = 256  # elements below which decoding beats a tile
ONE_BY_ONE = 512  # elements of a program that reads them each from its own place
FAR_APART = 12  # bytes from one such element to the next, from which a thread is to have two of them and no more
MOST_DIMENSIONS = 6  # after merging; what has more is cut into slices
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (*FLOATS, *FP8)
BYTES = (torch.bool, *FP8)  # moved as uint8, which every GPU has


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    """out[i] = x[i · stride]; a stride of one is known to the compiler, and then every access is wide."""
    offsets, whole = block_of(n, BLOCK)
    if whole:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets * stride))
    else:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets * stride, mask=offsets < n), mask=offsets < n)


@triton.jit
def copy_tiles_kernel(
    x_ptr, out_ptr,
    rows, columns, x_row, x_column, out_row, size1, size2, size3, x0, x1, x2, x3, out0, out1, out2, out3,
    INDEX: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out[batch, row, column] = x[batch, row, column] by tiles; batch stands for up to four dimensions.

    Rows of odd width are moved element by element, and then instructions count: places within a tile are in INDEX, 32
    bits where they do, and only a tile at the edge is masked.
    """
    column_tiles = tl.cdiv(columns, COLS)
    tile = tl.program_id(0) // column_tiles
    batch = (tile // tl.cdiv(rows, ROWS)).to(tl.int64)
    first_row = (tile % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS
    first_column = (tl.program_id(0) % column_tiles).to(tl.int64) * COLS
    x_ptr += first_row * x_row + first_column * x_column + batch % size3 * x3
    out_ptr += first_row * out_row + first_column + batch % size3 * out3
    batch = batch // size3
    x_ptr += batch % size2 * x2
    out_ptr += batch % size2 * out2
    batch = batch // size2
    x_ptr += batch % size1 * x1 + batch // size1 * x0
    out_ptr += batch % size1 * out1 + batch // size1 * out0
    rows_left = tl.minimum(rows - first_row, ROWS).to(tl.int32)
    columns_left = tl.minimum(columns - first_column, COLS).to(tl.int32)
    whole = (rows_left == ROWS) & (columns_left == COLS)
    if TURNED:  # read as it lies, columns by rows
        row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLS)[:, None]
    else:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    source = x_ptr + (row.to(INDEX) * x_row + column.to(INDEX) * x_column)
    if whole:
        x = tl.load(source)
    else:
        x = tl.load(source, mask=(row < rows_left) & (column < columns_left))
    if TURNED:
        x = tl.trans(x)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    target = out_ptr + (row.to(INDEX) * out_row + column)
    if whole:
        tl.store(target, x)
    else:
        tl.store(target, x, mask=(row < rows_left) & (column < columns_left))


@triton.jit
def copy_decoded_kernel(
    x_ptr, out_ptr,
    n, size1, size2, size3, size4, size5, x0, x1, x2, x3, x4, x5,
    INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = x[where i is in the view], i in INDEX, 32 bits where they do: division in 64 is many times slower."""
    offsets, _ = block_of(n, BLOCK)
    place = offsets.to(INDEX)
    source = (place % size5).to(tl.int64) * x5
    place = place // size5
    source += (place % size4).to(tl.int64) * x4
    place = place // size4
    source += (place % size3).to(tl.int64) * x3
    place = place // size3
    source += (place % size2).to(tl.int64) * x2
    place = place // size2
    source += (place % size1).to(tl.int64) * x1 + (place // size1).to(tl.int64) * x0
    tl.store(out_ptr + offsets, tl.load(x_ptr + source, mask=offsets < n), mask=offsets < n)


@triton.jit
def spread_kernel(
    grad_ptr, out_ptr,  # integers as wide as an element, and as wide as one with zeros behind it
    rows, columns, grad_stride,
    STEP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out[row, STEP · i] = grad[row, i] and zero between, in one dense pass over out.

    Compiled for each step: dividing by a number that is known takes a few instructions, by any other some thirty.
    """
    WIDTH: tl.constexpr = grad_ptr.dtype.element_ty.primitive_bitwidth
    column_tiles = tl.cdiv(columns, COLS)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tl.program_id(0) % column_tiles).to(tl.int64) * COLS
    column = first + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    since = (first % STEP).to(tl.int32) + tl.arange(0, COLS)[None, :]  # from the last multiple of STEP up to `first`
    source = row * grad_stride + first // STEP + since // STEP
    if TOGETHER:  # no more than a thread writes at once, so that none changes hands between load and store
        source = tl.max_contiguous(source, [1, TOGETHER])
    # Nothing is read twice. Yet where all of out is written as integers that are read, an H200 is one percent faster so.
    policy: tl.constexpr = "evict_last" if STEP == 1 else ""
    grad = tl.load(grad_ptr + source, mask=inside & (since % STEP == 0), other=0, eviction_policy=policy)
    if out_ptr.dtype.element_ty.primitive_bitwidth > WIDTH:
        grad = grad.to(out_ptr.dtype.element_ty) & ((1 << WIDTH) - 1)  # as it lies in memory: zeros above
    tl.store(out_ptr + row * columns + column, grad, mask=inside)


def merged(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The fewest dimensions, in the same order, that describe a view: without ones, neighbours merged that lie as one."""
    fewer: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if fewer and fewer[-1][1] == size * stride:
            fewer[-1] = fewer[-1][0] * size, stride
        else:
            fewer.append((size, stride))
    fewer = fewer or [(1, 1)]
    return [size for size, _ in fewer], [stride for _, stride in fewer]


@dataclass(frozen=True)
class Walk:
    """How a view is written densely: a launch, less its two tensors."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def index_up_to(farthest: int) -> tl.dtype:
    return tl.int32 if farthest < 2**31 else tl.int64


def power_of_two_up_to(most: int, size: int) -> int:
    return min(next_power(size), most)


@functools.lru_cache(maxsize=1 << 14)
def walk_of(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Walk | None:
    """The walk over a view that is not empty; None when it has too many dimensions for one launch."""
    sizes_left, strides_left = merged(sizes, strides)
    n = math.prod(sizes_left)
    if len(sizes_left) == 1:
        if strides_left == [1]:
            block, warps = FLAT_BYTES // itemsize, 4
        else:
            far = strides_left[0] * itemsize >= FAR_APART
            block, warps = (ONE_BY_ONE, 8) if far else (2 * ONE_BY_ONE, 4)
        return Walk(copy_kernel, (cdiv(n, block),), (n, *strides_left), dict(BLOCK=block, num_warps=warps))
    if len(sizes_left) > MOST_DIMENSIONS:
        return None
    return tiled(sizes_left, strides_left, itemsize) or decoded(sizes_left, strides_left, n)


def tiled(sizes: list[int], strides: list[int], itemsize: int) -> Walk | None:
    """The walk by tiles, where two of the dimensions fill one."""
    last = len(sizes) - 1
    elements = min(TILE_BYTES // itemsize, TILE_ELEMENTS)
    dense = min((d for d in range(last) if strides[d]), key=lambda d: strides[d], default=last)
    turned = 0 < strides[dense] < strides[last]
    columns = power_of_two_up_to(TILE_SIDE // itemsize * (1 if turned else 4), sizes[last])
    row = dense if turned else max(range(last), key=lambda d: (min(sizes[d], elements // columns), d))
    rows = power_of_two_up_to(elements // columns, sizes[row])
    if turned:  # a short side of the view leaves its part of the tile to the other
        columns = power_of_two_up_to(elements // rows, sizes[last])
        rows = power_of_two_up_to(max(elements // columns, 1), sizes[row])
    if min(sizes[row], rows) * min(sizes[last], columns) < SMALLEST_TILE:
        return None
    dense_strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    outer = [d for d in range(last) if d != row]
    absent = MOST_DIMENSIONS - 2 - len(outer)
    ones, zeros = [1] * absent, [0] * absent  # zero strides keep the pointers as aligned as they are
    batch = math.prod(sizes[d] for d in outer)
    numbers = (
        sizes[row], sizes[last], strides[row], strides[last], dense_strides[row],
        *(ones + [sizes[d] for d in outer])[1:], *zeros, *(strides[d] for d in outer), *zeros, *(dense_strides[d] for d in outer),
    )  # fmt: skip
    grid = (batch * cdiv(sizes[row], rows) * cdiv(sizes[last], columns),)
    farthest = max(rows * strides[row] + columns * strides[last], rows * dense_strides[row] + columns)
    constants = dict(INDEX=index_up_to(farthest), TURNED=turned, ROWS=rows, COLS=columns, num_warps=8)
    return Walk(copy_tiles_kernel, grid, numbers, constants)


def decoded(sizes: list[int], strides: list[int], n: int) -> Walk:
    pad = [1] * (MOST_DIMENSIONS - len(sizes))
    numbers = (n, *(pad + sizes)[1:], *pad, *strides)
    constants = dict(INDEX=index_up_to(n + ONE_BY_ONE), BLOCK=ONE_BY_ONE, num_warps=4)
    return Walk(copy_decoded_kernel, (cdiv(n, ONE_BY_ONE),), numbers, constants)


def written_densely(x: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The view of x that starts where x does and has these sizes and strides, in fresh and contiguous memory."""
    out = torch.empty(sizes, dtype=x.dtype, device=x.device)
    if out.numel():
        source, target = (x.view(torch.uint8), out.view(torch.uint8)) if x.dtype in BYTES else (x, out)
        fill(target, source, tuple(sizes), tuple(strides))
    return out


def fill(out: Tensor, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    walk = walk_of(sizes, strides, x.itemsize)
    if walk is not None:
        launch(walk.kernel, walk.grid, x, out, *walk.numbers, **walk.constants)
        return
    view = x.as_strided(sizes, strides)
    for part, source in zip(out.unbind(), view.unbind(), strict=True):
        fill(part, source, sizes[1:], strides[1:])


@implements(ops.copy, backend="triton", repeat=straight_line, backward=copy_gradient, dtypes=MOVED)
def copy(x: Tensor) -> Tensor:
    return written_densely(x, x.shape, x.stride())


@implements(ops.transpose, backend="triton", repeat=straight_line, backward=transpose_gradient, dtypes=MOVED)
def transpose(x: Tensor) -> Tensor:
    *sizes, rows, columns = x.shape
    *strides, row, column = x.stride()
    return written_densely(x, (*sizes, columns, rows), (*strides, column, row))


@implements(ops.permute, backend="triton", repeat=straight_line, backward=permute_gradient, dtypes=MOVED)
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    sizes, strides = x.shape, x.stride()
    return written_densely(x, [sizes[d] for d in dims], [strides[d] for d in dims])


def strided_copy_backward(grad: Tensor, x: Tensor, step: int) -> Tensor:
    out = torch.empty(x.shape, dtype=grad.dtype, device=grad.device)
    if not out.numel():
        return out
    source, columns = rows_of(grad), x.shape[-1]
    # An element and the zeros behind it are one wider integer: fewer, and only those that begin with an element are read.
    joined = next(n for n in (8, 4, 2, 1) if n * grad.itemsize <= 8 and step % n == 0 and columns % n == 0)
    step, columns = step // joined, columns // joined
    rows, stride = source.shape[0], source.stride(0)
    if columns % step == 0 and stride * step == columns:  # all rows lie as one
        rows, columns = 1, rows * columns
    units = SPREAD_BYTES // (joined * grad.itemsize)
    width = power_of_two_up_to(units, columns)
    height = units // width
    launch(
        spread_kernel, (cdiv(rows, height) * cdiv(columns, width),),
        source.view(INTEGERS[grad.itemsize]), out.view(INTEGERS[grad.itemsize * joined]), rows, columns, stride,
        STEP=step, TOGETHER=GRANULE // (joined * grad.itemsize) if step == 1 else 0, ROWS=height, COLS=width, num_warps=SPREAD_WARPS,
    )  # fmt: skip
    return out


@implements(ops.strided_copy, backend="triton", repeat=straight_line, backward=strided_copy_backward, dtypes=MOVED)
def strided_copy(x: Tensor, step: int) -> Tensor:
    *sizes, columns = x.shape
    *strides, stride = x.stride()
    return written_densely(x, (*sizes, cdiv(columns, step)), (*strides, stride * step))
