"""Codes of a tile both ways without shared memory between them: every thread holds a block that it can store either way.

    columns →                        A thread has 8 rows of 8 numbers, 16 bytes each, and so 8 neighbours along a row and
    rows   [ 8 numbers ]             along a column: it stores 8 codes at once either way. Which of its registers come first
     ↓     [     …     ]             is all that differs between the two, and nothing moves.
           [ 8 numbers ]
    a warp     4 threads side by side load 64 bytes of a row, 8 one below the other store 64 bytes of a column

A tile turned through shared memory goes byte by byte (`quantised/fp8_tiles.py`, which has the arithmetic and takes any size).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.quantised.codes import codes_of, scale_of, writes_fp8
from tilestack.kernels.quantised.fp8_tiles import launch_tiles, of_whole_vectors
from tilestack.ops.quantised_linear import E4M3

ROWS = 8  # of a thread, and as many columns
WARPS = 8
REGISTERS = 128  # of a thread, so that a multiprocessor has two tiles at a time


@gluon.constexpr_function
def bases(size, dim, step=1):
    """Steps of powers of two along one of two dimensions."""
    return [[step << n, 0] if dim == 0 else [0, step << n] for n in range(size.bit_length() - 1)]


@gluon.constexpr_function
def block_layout(ROWS, BLOCK, rows_first):
    """Threads with as many rows as columns of a tile, their numbers in the order of a row or, with rows first, a column."""
    of_rows, of_columns = bases(ROWS, 0), bases(ROWS, 1)
    return gl.DistributedLinearLayout(
        reg_bases=of_rows + of_columns if rows_first else of_columns + of_rows,
        lane_bases=bases(4, 1, ROWS) + bases(8, 0, ROWS),
        warp_bases=bases(BLOCK // (4 * ROWS), 1, 4 * ROWS) + bases(BLOCK // (8 * ROWS), 0, 8 * ROWS),
        block_bases=[],
        shape=[BLOCK, BLOCK],
    )


@triton.jit
def larger_magnitude(a, b):
    """Of two numbers, where a NaN wins; in one instruction, and without magnitudes that lie in registers beside x."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def store_both_ways(
    x, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # a tile in registers, and where its matrix goes
    rows, columns, tile_row, tile_column,
    BY_ROWS: gl.constexpr, TURNED_BY_ROWS: gl.constexpr, LARGEST_CODE: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Code a tile along its rows and along its columns."""
    LAYOUT: gl.constexpr = block_layout(ROWS, BLOCK, False)
    TURNED: gl.constexpr = block_layout(ROWS, BLOCK, True)
    across = gl.cdiv(columns, BLOCK)
    down = gl.cdiv(rows, BLOCK)
    first_row = tile_row.to(gl.int64) * BLOCK
    first_column = tile_column.to(gl.int64) * BLOCK
    codes_ptr += first_row * columns + first_column
    turned_ptr += first_column * rows + first_row
    line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    row = first_row + line
    column = first_column + place
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    of_rows = gl.reduce(x, 1, larger_magnitude)
    if BY_ROWS:
        scale = scale_of(of_rows, LARGEST_CODE)
        gl.store(scale_ptr + row * across + tile_column, scale, mask=row < rows)
        codes = codes_of(x, scale[:, None], codes_ptr.dtype.element_ty)
    else:
        whole = scale_of(gl.reduce(of_rows, 0, larger_magnitude), LARGEST_CODE)
        gl.store(scale_ptr + tile_row * across + tile_column, whole)
        codes = codes_of(x, whole, codes_ptr.dtype.element_ty)
    gl.store(codes_ptr + line[:, None] * columns + place[None, :], codes, mask=inside)
    if TURNED_BY_ROWS:
        turned_scale = scale_of(gl.reduce(x, 0, larger_magnitude), LARGEST_CODE)
        gl.store(turned_scale_ptr + column * down + tile_row, turned_scale, mask=column < columns)
        turned = codes_of(x, turned_scale[None, :], codes_ptr.dtype.element_ty)
    else:
        of_lines = of_rows if BY_ROWS else gl.reduce(x, 0, larger_magnitude)
        turned_whole = scale_of(gl.reduce(of_lines, 0, larger_magnitude), LARGEST_CODE)
        gl.store(turned_scale_ptr + tile_column * down + tile_row, turned_whole)
        turned = codes_of(x, turned_whole, codes_ptr.dtype.element_ty)
    turned_line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, TURNED))
    turned_place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, TURNED))
    turned_inside = (first_row + turned_line < rows)[:, None] & (first_column + turned_place < columns)[None, :]
    gl.store(
        turned_ptr + turned_place[None, :] * rows + turned_line[:, None],
        gl.convert_layout(turned, TURNED), mask=turned_inside,
    )  # fmt: skip


@gluon.jit
def code_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # [rows, columns] twice, scales, [columns, rows], scales
    rows, columns, stride_matrix, stride_row, stride_column,
    BY_ROWS: gl.constexpr, TURNED_BY_ROWS: gl.constexpr, LARGEST_CODE: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = block_layout(ROWS, BLOCK, False)
    across = gl.cdiv(columns, BLOCK)
    down = gl.cdiv(rows, BLOCK)
    tile_row = gl.program_id(0) // across
    tile_column = gl.program_id(0) % across
    first_row = tile_row.to(gl.int64) * BLOCK
    first_column = tile_column.to(gl.int64) * BLOCK
    matrix = gl.program_id(1).to(gl.int64)
    x_ptr += matrix * stride_matrix + first_row * stride_row + first_column * stride_column
    codes_ptr += matrix * rows * columns
    turned_ptr += matrix * rows * columns
    scale_ptr += matrix * (rows if BY_ROWS else down) * across
    turned_scale_ptr += matrix * (columns if TURNED_BY_ROWS else across) * down
    line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = (first_row + line < rows)[:, None] & (first_column + place < columns)[None, :]
    x = gl.load(x_ptr + line[:, None] * stride_row + place[None, :] * stride_column, mask=inside, other=0)
    store_both_ways(
        x.to(gl.float32), codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows, columns, tile_row, tile_column,
        BY_ROWS, TURNED_BY_ROWS, LARGEST_CODE, BLOCK, ROWS,
    )  # fmt: skip


def holds_vectors(x: Tensor) -> bool | str:
    found = writes_fp8(x)
    if found is not True:
        return found
    return of_whole_vectors(x) or "rows, columns and the distances between them must be multiples of 16"


@implements(ops.fp8_tiles, backend="gluon", repeat=straight_line, dtypes=HALVES, when=holds_vectors)
def fp8_tiles(x: Tensor, by: str, turned_by: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return launch_tiles(code_blocks_kernel, x, by, turned_by, E4M3, WARPS, ROWS=ROWS, maxnreg=REGISTERS)
