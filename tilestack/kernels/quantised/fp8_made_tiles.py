"""Tiles coded both ways, as in `fp8_tiles.py`, of numbers that are made of other tensors on the way.

    KIND        x              beside it        what is coded
    pair        [gate | up]                     silu(gate) · up
    gradient    [gate | up]    grad             [dgate | dup]
    loss        logits         lse, labels      exp(logits - lse) - [column = label]

A program has 128 by 128 of what is coded. It goes through its tile some rows at a time, and once more, from the cache, when
the scales of its columns are known: so any size fits into registers. Where the last column of dgate is not the last of a
tile, dup begins in the middle of it, and every column is told by itself which of the two it is.
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
from tilestack.kernels.elementwise.activation import activate, slope
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, codes_of, magnitudes, scale_of, writes_fp8
from tilestack.kernels.quantised.fp8_tiles import STRIP, empty_codes, of_whole_vectors
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.quantised import LARGEST_CODE
from tilestack.ops.quantised_linear import BLOCK, E4M3

ODD_STRIP = 8  # rows of a strip whose elements have addresses of their own, in three tensors


@triton.jit
def gated_part(
    x_ptr, grad_ptr, row, column, inside, half, stride_row, stride_column, grad_stride_row, grad_stride_column,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up at rows and columns of it or, of its gradient, dgate or dup, whichever lies there."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    within = tl.where(column < half, column, column - half) if GRADIENT else column
    at = x_ptr + row[:, None] * stride_row + within[None, :] * stride_column
    gate = wide(tl.load(at, mask=inside, other=0))
    up = wide(tl.load(at + half * stride_column, mask=inside, other=0))
    if GRADIENT:
        at = grad_ptr + row[:, None] * grad_stride_row + within[None, :] * grad_stride_column
        grad = wide(tl.load(at, mask=inside, other=0))
        dgate = grad * up * slope(gate, "silu", HALF)
        made = tl.where((column < half)[None, :], dgate, grad * activate(gate, "silu", HALF))
    else:
        made = activate(gate, "silu", HALF) * up
    return made


@triton.jit
def loss_part(x_ptr, lse_ptr, labels_ptr, row, column, inside, rows, columns, stride_row, stride_column, ignore_index):
    """The gradient of a sum of losses at rows and columns of the logits."""
    at = x_ptr + row[:, None] * stride_row + column[None, :] * stride_column
    logits = wide(tl.load(at, mask=inside, other=0))
    lse = wide(tl.load(lse_ptr + row, mask=row < rows, other=0))
    label = tl.load(labels_ptr + row, mask=row < rows, other=0)
    made = tl.exp(logits - lse[:, None]) - tl.where(column[None, :] == label[:, None], 1.0, 0.0)
    made = tl.where(((label >= 0) & (label < columns))[:, None], made, float("nan"))
    return tl.where(inside & (label != ignore_index)[:, None], made, 0.0)


@triton.jit
def made_part(
    x_ptr, grad_ptr, lse_ptr, labels_ptr, row, column, inside, rows, columns, half, ignore_index,
    stride_row, stride_column, grad_stride_row, grad_stride_column, KIND: tl.constexpr,
):  # fmt: skip
    if KIND == "loss":
        made = loss_part(
            x_ptr, lse_ptr, labels_ptr, row, column, inside, rows, columns, stride_row, stride_column, ignore_index
        )
    else:
        made = gated_part(
            x_ptr, grad_ptr, row, column, inside, half, stride_row, stride_column, grad_stride_row, grad_stride_column,
            KIND == "gradient",
        )  # fmt: skip
    return made


@triton.jit
def code_made_kernel(
    x_ptr, grad_ptr, lse_ptr, labels_ptr,  # [rows, columns or twice half], [rows, half], [rows], [rows], or None
    codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # as in `fp8_tiles`
    rows, columns, half, ignore_index, stride_row, stride_column, grad_stride_row, grad_stride_column,
    KIND: tl.constexpr, BY_ROWS: tl.constexpr, TURNED_BY_ROWS: tl.constexpr, LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK)
    down = tl.cdiv(rows, BLOCK)
    tile_row = tl.program_id(0) // across
    tile_column = tl.program_id(0) % across
    column = tile_column.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_columns = tl.zeros([BLOCK], tl.float32)
    of_rows = tl.zeros([STRIP], tl.float32)
    for top in range(0, BLOCK, STRIP):
        row = tile_row.to(tl.int64) * BLOCK + top + tl.arange(0, STRIP)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        made = made_part(
            x_ptr, grad_ptr, lse_ptr, labels_ptr, row, column, inside, rows, columns, half, ignore_index,
            stride_row, stride_column, grad_stride_row, grad_stride_column, KIND,
        )  # fmt: skip
        size = magnitudes(made)
        of_columns = tl.maximum(of_columns, tl.max(size, 0))
        if BY_ROWS:
            scale = scale_of(tl.max(size, 1), LARGEST_CODE)
            tl.store(scale_ptr + row * across + tile_column, scale, mask=row < rows)
            codes = codes_of(made, scale[:, None], codes_ptr.dtype.element_ty)
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
        made = made_part(
            x_ptr, grad_ptr, lse_ptr, labels_ptr, row, column, inside, rows, columns, half, ignore_index,
            stride_row, stride_column, grad_stride_row, grad_stride_column, KIND,
        )  # fmt: skip
        if not BY_ROWS:
            codes = codes_of(made, whole, codes_ptr.dtype.element_ty)
            tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
        codes = codes_of(made, turned_scale[None, :], codes_ptr.dtype.element_ty)
        tl.store(turned_ptr + column[:, None] * rows + row[None, :], codes.T, mask=inside.T)


Made = tuple[Tensor, Tensor, Tensor, Tensor]


def launch_made(
    kernel: Any, programs: int, kind: str, x: Tensor, grad: Tensor | None, lse: Tensor | None, labels: Tensor | None,
    columns: int, ignore_index: int, by: str, turned_by: str, dtype: torch.dtype, **constants: int,
) -> Made:  # fmt: skip
    """Codes and scales both ways of so many columns, by a kernel like the one above."""
    made = empty_codes(x, x.shape[0], columns, by, turned_by, dtype)
    launch(
        kernel, (programs,), x, grad, lse, labels, *made, x.shape[0], columns, x.shape[1] // 2, ignore_index,
        *x.stride(), *((0, 0) if grad is None else grad.stride()),
        KIND=kind, BY_ROWS=by == "rows", TURNED_BY_ROWS=turned_by == "rows", LARGEST_CODE=LARGEST_CODE[dtype], BLOCK=BLOCK,
        num_warps=8, **constants,
    )  # fmt: skip
    return made


def strip_of(*given: Tensor | None) -> int:
    """Rows of a strip: fewer where those of a tensor are no whole vectors."""
    return STRIP if all(of_whole_vectors(x) for x in given if x is not None) else ODD_STRIP


def code_gated(grad: Tensor | None, x: Tensor, by: str, turned_by: str, dtype: torch.dtype) -> Made:
    """Codes of the pair in x or, given a gradient of the pair, of that of x."""
    kind, columns = ("pair", x.shape[1] // 2) if grad is None else ("gradient", x.shape[1])
    programs = cdiv(x.shape[0], BLOCK) * cdiv(columns, BLOCK)
    return launch_made(
        code_made_kernel,
        programs,
        kind,
        x,
        grad,
        None,
        None,
        columns,
        0,
        by,
        turned_by,
        dtype,
        STRIP=strip_of(x, grad),
    )


def code_loss(
    logits: Tensor, lse: Tensor, labels: Tensor, ignore_index: int, by: str, turned_by: str, dtype: torch.dtype
) -> Made:
    rows, columns = logits.shape
    programs, beside = cdiv(rows, BLOCK) * cdiv(columns, BLOCK), (lse.contiguous(), labels.contiguous())
    return launch_made(
        code_made_kernel,
        programs,
        "loss",
        logits,
        None,
        *beside,
        columns,
        ignore_index,
        by,
        turned_by,
        dtype,
        STRIP=strip_of(logits),
    )


@implements(ops.swiglu_fp8_tiles, backend="triton", repeat=straight_line, dtypes=HALVES_AND_SINGLE, when=writes_fp8)
def swiglu_fp8_tiles(x: Tensor, by: str, turned_by: str) -> Made:
    return code_gated(None, x, by, turned_by, E4M3)


@implements(
    ops.swiglu_gradient_fp8_tiles, backend="triton", repeat=straight_line, dtypes=HALVES_AND_SINGLE, when=writes_fp8
)
def swiglu_gradient_fp8_tiles(grad: Tensor, x: Tensor, by: str, turned_by: str) -> Made:
    return code_gated(grad, x, by, turned_by, E4M3)


@implements(
    ops.cross_entropy_gradient_fp8_tiles,
    backend="triton",
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    when=lambda logits: writes_fp8(logits),
)
def cross_entropy_gradient_fp8_tiles(
    logits: Tensor, lse: Tensor, labels: Tensor, ignore_index: int, by: str, turned_by: str
) -> Made:
    return code_loss(logits, lse, labels, ignore_index, by, turned_by, E4M3)
