"""Rows as codes: read once and kept in registers until the largest magnitude is known, or, where they are too long for
that, read once for it and once more, from the cache, for the codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, codes_of, magnitudes, scale_of, writes_fp8
from tilestack.kernels.tiles import cdiv, rows_of, tile_of_rows, wide
from tilestack.ops.quantised import LARGEST_CODE

WIDEST_IN_REGISTERS = 32768  # columns
PART = 8192  # columns of a longer row that are read at a time


@triton.jit
def quantise_rows_kernel(
    x_ptr, codes_ptr, scale_ptr,  # [rows, columns] twice, [rows]
    rows, columns, stride, LARGEST_CODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row * stride + column, mask=inside, other=0))
    scale = scale_of(tl.max(magnitudes(x), 1, keep_dims=True), LARGEST_CODE)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(codes_ptr + row * columns + column, codes_of(x, scale, codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantise_long_rows_kernel(
    x_ptr, codes_ptr, scale_ptr,  # [rows, columns] twice, [rows]
    columns, stride, LARGEST_CODE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    codes_ptr += row * columns
    largest = tl.zeros([COLS], tl.float32)
    for first in range(0, columns, COLS):
        column = first + tl.arange(0, COLS)
        x = wide(tl.load(x_ptr + column, mask=column < columns, other=0))
        largest = tl.maximum(largest, magnitudes(x))
    scale = scale_of(tl.max(largest, 0), LARGEST_CODE)
    tl.store(scale_ptr + row, scale)
    for first in range(0, columns, COLS):
        column = first + tl.arange(0, COLS)
        x = wide(tl.load(x_ptr + column, mask=column < columns, other=0))
        tl.store(codes_ptr + column, codes_of(x, scale, codes_ptr.dtype.element_ty), mask=column < columns)


def quantised_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x = rows_of(x)
    rows, columns = x.shape
    if columns > WIDEST_IN_REGISTERS:
        launch(
            quantise_long_rows_kernel, (rows,), x, codes, scale, columns, x.stride(0),
            LARGEST_CODE=LARGEST_CODE[dtype], COLS=PART, num_warps=8,
        )  # fmt: skip
        return codes, scale
    height, width, warps = tile_of_rows(columns)
    launch(
        quantise_rows_kernel, (cdiv(rows, height),), x, codes, scale, rows, columns, x.stride(0),
        LARGEST_CODE=LARGEST_CODE[dtype], ROWS=height, COLS=width, num_warps=warps,
    )  # fmt: skip
    return codes, scale


@implements(ops.quantise_rows_int8, backend="triton", invariant=True, repeat=straight_line, dtypes=HALVES_AND_SINGLE)
def quantise_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised_rows(x, torch.int8)


@implements(
    ops.quantise_rows_fp8,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    when=writes_fp8,
)
def quantise_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised_rows(x, torch.float8_e4m3fn)
