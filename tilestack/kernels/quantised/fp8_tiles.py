"""A tile of 128 by 128 read once and written twice, as codes along its rows and, turned, along its columns.

Where there are several matrices, programs of the grid's second dimension have one each.

    x                    codes              turned            scales by rows: each line of the tile has its own;
+-------+   largest    +-------+          +---+               turned, each column of it. By blocks: one for the tile,
|  →→→  |   of lines   |  8 bit|          | 8 |               both ways, and the codes are the same.
|  ↓↓↓  |   columns    +-------+          | b |
+-------+   or all                        +---+

Even where both scales are one, each way finds its own, by rows and by columns, and makes its own codes. Of codes that are
shared, float32's went wrong on sm_90: ptxas 12.8 packs pairs of them for one store, and before that has handed the other
store what was in its register.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, codes_of, magnitudes, scale_of, writes_fp8
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.quantised import LARGEST_CODE
from tilestack.ops.quantised_linear import BLOCK, E4M3

VECTOR = 16  # elements
STRIP = 32  # rows of a tile whose elements have an address each


@triton.jit
def code_tiles_kernel(
    x_ptr, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # [rows, columns] twice, scales, [columns, rows], scales
    rows, columns, stride_matrix, stride_row, stride_column,
    BY_ROWS: tl.constexpr, TURNED_BY_ROWS: tl.constexpr, LARGEST_CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK)
    down = tl.cdiv(rows, BLOCK)
    tile_row = tl.program_id(0) // across
    tile_column = tl.program_id(0) % across
    # Offsets within a tile take half the registers of those from the start.
    first_row = tile_row.to(tl.int64) * BLOCK
    first_column = tile_column.to(tl.int64) * BLOCK
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * stride_matrix + first_row * stride_row + first_column * stride_column
    codes_ptr += matrix * rows * columns + first_row * columns + first_column
    turned_ptr += matrix * rows * columns + first_column * rows + first_row
    scale_ptr += matrix * (rows if BY_ROWS else down) * across
    turned_scale_ptr += matrix * (columns if TURNED_BY_ROWS else across) * down
    line = tl.arange(0, BLOCK)
    row = first_row + line
    column = first_column + line
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = wide(tl.load(x_ptr + line[:, None] * stride_row + line[None, :] * stride_column, mask=inside, other=0))
    size = magnitudes(x)
    of_rows = tl.max(size, 1)
    if BY_ROWS:
        scale = scale_of(of_rows, LARGEST_CODE)
        tl.store(scale_ptr + row * across + tile_column, scale, mask=row < rows)
        codes = codes_of(x, scale[:, None], codes_ptr.dtype.element_ty)
    else:
        whole = scale_of(tl.max(of_rows, 0), LARGEST_CODE)
        tl.store(scale_ptr + tile_row * across + tile_column, whole)
        codes = codes_of(x, whole, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + line[:, None] * columns + line[None, :], codes, mask=inside)
    if TURNED_BY_ROWS:
        scale = scale_of(tl.max(size, 0), LARGEST_CODE)
        tl.store(turned_scale_ptr + column * down + tile_row, scale, mask=column < columns)
        codes = codes_of(x, scale[None, :], codes_ptr.dtype.element_ty)
    else:
        whole = scale_of(tl.max(of_rows if BY_ROWS else tl.max(size, 0), 0), LARGEST_CODE)
        tl.store(turned_scale_ptr + tile_column * down + tile_row, whole)
        codes = codes_of(x, whole, codes_ptr.dtype.element_ty)
    tl.store(turned_ptr + line[:, None] * rows + line[None, :], codes.T, mask=inside.T)


@triton.jit
def code_strips_kernel(
    x_ptr, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # as above
    rows, columns, stride_matrix, stride_row, stride_column,
    BY_ROWS: tl.constexpr, TURNED_BY_ROWS: tl.constexpr, LARGEST_CODE: tl.constexpr, BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """The same, some rows of the tile at a time, and from the cache once more when its scales are known: where rows are no
    whole vectors each element has an address of its own, and a tile of them does not fit into registers."""
    across = tl.cdiv(columns, BLOCK)
    down = tl.cdiv(rows, BLOCK)
    tile_row = tl.program_id(0) // across
    tile_column = tl.program_id(0) % across
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * stride_matrix
    codes_ptr += matrix * rows * columns
    turned_ptr += matrix * rows * columns
    scale_ptr += matrix * (rows if BY_ROWS else down) * across
    turned_scale_ptr += matrix * (columns if TURNED_BY_ROWS else across) * down
    column = tile_column.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_columns = tl.zeros([BLOCK], tl.float32)
    of_rows = tl.zeros([STRIP], tl.float32)
    for top in range(0, BLOCK, STRIP):
        row = tile_row.to(tl.int64) * BLOCK + top + tl.arange(0, STRIP)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_row + column[None, :] * stride_column, mask=inside, other=0)
        size = magnitudes(wide(x))
        of_columns = tl.maximum(of_columns, tl.max(size, 0))
        if BY_ROWS:
            scale = scale_of(tl.max(size, 1), LARGEST_CODE)
            tl.store(scale_ptr + row * across + tile_column, scale, mask=row < rows)
            codes = codes_of(wide(x), scale[:, None], codes_ptr.dtype.element_ty)
            tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
        else:
            of_rows = tl.maximum(of_rows, tl.max(size, 1))
    if not BY_ROWS:
        whole = scale_of(tl.max(of_rows, 0), LARGEST_CODE)
        tl.store(scale_ptr + tile_row * across + tile_column, whole)
    if TURNED_BY_ROWS:
        turned_scale = scale_of(of_columns, LARGEST_CODE)
        tl.store(turned_scale_ptr + column * down + tile_row, turned_scale, mask=column < columns)
    else:
        turned_whole = scale_of(tl.max(of_columns, 0), LARGEST_CODE)
        turned_scale = tl.broadcast_to(turned_whole, [BLOCK])
        tl.store(turned_scale_ptr + tile_column * down + tile_row, turned_whole)
    for top in range(0, BLOCK, STRIP):
        row = tile_row.to(tl.int64) * BLOCK + top + tl.arange(0, STRIP)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = wide(tl.load(x_ptr + row[:, None] * stride_row + column[None, :] * stride_column, mask=inside, other=0))
        if not BY_ROWS:
            codes = codes_of(x, whole, codes_ptr.dtype.element_ty)
            tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
        codes = codes_of(x, turned_scale[None, :], codes_ptr.dtype.element_ty)
        tl.store(turned_ptr + column[:, None] * rows + row[None, :], codes.T, mask=inside.T)


def of_whole_vectors(x: Tensor) -> bool:
    """Whether rows are whole vectors, and places within a tile are numbers of 32 bits."""
    *strides, last = x.stride()
    near = BLOCK * max(*x.shape[-2:], x.stride(-2)) < 2**31
    return last == 1 and near and not any(n % VECTOR for n in (*x.shape[-2:], *strides))


def empty_codes(
    x: Tensor, rows: int, columns: int, by: str, turned_by: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the codes and scales both ways of a matrix of so many rows and columns, or of as many as x has."""
    down, across = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
    empty = lambda *sizes, dtype=torch.float32: torch.empty((*x.shape[:-2], *sizes), dtype=dtype, device=x.device)
    return (
        empty(rows, columns, dtype=dtype),
        empty(rows if by == "rows" else down, across),
        empty(columns, rows, dtype=dtype),
        empty(columns if turned_by == "rows" else across, down),
    )


def launch_tiles(
    kernel: Any, x: Tensor, by: str, turned_by: str, dtype: torch.dtype, warps: int = 8, **constants: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales both ways, by a kernel like those above."""
    (rows, columns), matrices = x.shape[-2:], x[None] if x.ndim == 2 else x
    made = empty_codes(x, rows, columns, by, turned_by, dtype)
    launch(
        kernel, (cdiv(rows, BLOCK) * cdiv(columns, BLOCK), len(matrices)), x, *made, rows, columns, *matrices.stride(),
        BY_ROWS=by == "rows", TURNED_BY_ROWS=turned_by == "rows", LARGEST_CODE=LARGEST_CODE[dtype], BLOCK=BLOCK,
        num_warps=warps, **constants,
    )  # fmt: skip
    return made


def code_tiles(x: Tensor, by: str, turned_by: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if of_whole_vectors(x):
        return launch_tiles(code_tiles_kernel, x, by, turned_by, dtype)
    return launch_tiles(code_strips_kernel, x, by, turned_by, dtype, STRIP=STRIP)


@implements(ops.fp8_tiles, backend="triton", repeat=straight_line, dtypes=HALVES_AND_SINGLE, when=writes_fp8)
def fp8_tiles(x: Tensor, by: str, turned_by: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return code_tiles(x, by, turned_by, E4M3)
