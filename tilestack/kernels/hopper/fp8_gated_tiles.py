"""Codes of a gated pair, or of its gradient, both ways in registers, as `fp8_tiles.py` makes those of a matrix.

    forward     gate ■  up ■           ──▶  h ■                     one tile of codes
    backward    grad ■  gate ■  up ■   ──▶  dup ■, then dgate ■     two, one after the other

What is loaded is 16 bits wide, what is coded 32: of the backward not both tiles fit at once beside what they are made of,
so the second asks for its inputs again, which its multiprocessor has just had.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate, sigmoid_of
from tilestack.kernels.hopper.fp8_tiles import REGISTERS, ROWS, block_layout, store_both_ways
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.quantised.codes import writes_fp8
from tilestack.kernels.quantised.fp8_made_tiles import Made, launch_made
from tilestack.kernels.quantised.fp8_tiles import VECTOR
from tilestack.kernels.tiles import cdiv
from tilestack.ops.quantised_linear import BLOCK, E4M3


@gluon.jit
def code_gated_blocks_kernel(
    x_ptr, grad_ptr, lse_ptr, labels_ptr,  # [rows, twice half], [rows, half] or None, and what only losses have
    codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # as in `fp8_tiles`
    rows, columns, half, ignore_index, stride_row, stride_column, grad_stride_row, grad_stride_column,
    KIND: gl.constexpr, BY_ROWS: gl.constexpr, TURNED_BY_ROWS: gl.constexpr, LARGEST_CODE: gl.constexpr,
    BLOCK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = block_layout(ROWS, BLOCK, False)
    GRADIENT: gl.constexpr = KIND == "gradient"
    across = gl.cdiv(half, BLOCK)
    number = gl.program_id(0) // 2 if GRADIENT else gl.program_id(0)
    tile_row = number // across
    tile_column = number % across
    first_row = tile_row.to(gl.int64) * BLOCK
    first_column = tile_column.to(gl.int64) * BLOCK
    line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = (first_row + line < rows)[:, None] & (first_column + place < half)[None, :]
    x_ptr += first_row * stride_row + first_column * stride_column
    offset = line[:, None] * stride_row + place[None, :] * stride_column
    gate = gl.load(x_ptr + offset, mask=inside, other=0)
    if GRADIENT:
        is_dup = gl.program_id(0) % 2
        tile_column += is_dup * across
        up = gl.load(x_ptr + half + offset, mask=inside & (is_dup == 0), other=0)
        grad_ptr += first_row * grad_stride_row + first_column * grad_stride_column
        offset = line[:, None] * grad_stride_row + place[None, :] * grad_stride_column
        grad = gl.load(grad_ptr + offset, mask=inside, other=0)
        gate = gate.to(gl.float32)
        share = sigmoid_of(gate, True)
        other = gl.where(is_dup == 0, up.to(gl.float32) * (1 + gate * (1 - share)), gate)
        made = grad.to(gl.float32) * share * other
    else:
        up = gl.load(x_ptr + half + offset, mask=inside, other=0)
        made = activate(gate.to(gl.float32), "silu", True) * up.to(gl.float32)
    store_both_ways(
        made, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows, columns,
        tile_row, tile_column, BY_ROWS, TURNED_BY_ROWS, LARGEST_CODE, BLOCK, ROWS,
    )  # fmt: skip


def in_vectors(x: Tensor, columns: int) -> bool | str:
    """Whether gate and up are whole vectors, and a multiple of so many columns each."""
    rows, half = x.shape[0], x.shape[1] // 2
    near = BLOCK * max(rows, x.shape[1], x.stride(0)) < 2**31
    if x.stride(1) != 1 or not near or any(n % VECTOR for n in (rows, half, x.stride(0))):
        return "rows, columns of gate and up and the distances between them must be multiples of 16"
    return half % columns == 0 or f"gate and up must be whole tiles of {columns} columns, not {half}"


def rows_in_vectors(grad: Tensor) -> bool | str:
    near = BLOCK * grad.stride(0) < 2**31
    return (grad.stride(1) == 1 and near and grad.stride(0) % VECTOR == 0) or "rows of grad must be whole vectors"


def takes_pair(x: Tensor) -> bool | str:
    return found if (found := writes_fp8(x)) is not True else in_vectors(x, VECTOR)


def takes_gradient(grad: Tensor, x: Tensor) -> bool | str:
    answers = writes_fp8(x), in_vectors(x, BLOCK), rows_in_vectors(grad)
    return next((answer for answer in answers if answer is not True), True)


def code_gated_blocks(grad: Tensor | None, x: Tensor, by: str, turned_by: str) -> Made:
    (kind, columns), half = ("pair", x.shape[1] // 2) if grad is None else ("gradient", x.shape[1]), x.shape[1] // 2
    programs = cdiv(x.shape[0], BLOCK) * cdiv(half, BLOCK) * (columns // half)
    return launch_made(
        code_gated_blocks_kernel, programs, kind, x, grad, None, None, columns, 0, by, turned_by, E4M3,
        ROWS=ROWS, maxnreg=REGISTERS,
    )  # fmt: skip


@implements(ops.swiglu_fp8_tiles, backend="gluon", repeat=straight_line, dtypes=HALVES, when=takes_pair)
def swiglu_fp8_tiles(x: Tensor, by: str, turned_by: str) -> Made:
    return code_gated_blocks(None, x, by, turned_by)


@implements(ops.swiglu_gradient_fp8_tiles, backend="gluon", repeat=straight_line, dtypes=HALVES, when=takes_gradient)
def swiglu_gradient_fp8_tiles(grad: Tensor, x: Tensor, by: str, turned_by: str) -> Made:
    return code_gated_blocks(grad, x, by, turned_by)
