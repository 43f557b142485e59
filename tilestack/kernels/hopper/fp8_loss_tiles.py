"""Codes of a cross-entropy's gradient both ways in registers, as `fp8_tiles.py` makes those of a matrix.

A tile of logits is read, exp(logits - lse) - [column = label] made of it where it lies, and coded: the gradient of a
vocabulary's logits, which is the largest matrix of a step, is never in memory but as codes.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.hopper.fp8_tiles import REGISTERS, ROWS, block_layout, holds_vectors, store_both_ways
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.quantised.fp8_made_tiles import Made, launch_made
from tilestack.kernels.tiles import cdiv
from tilestack.ops.quantised_linear import BLOCK, E4M3


@gluon.jit
def code_loss_blocks_kernel(
    x_ptr, grad_ptr, lse_ptr, labels_ptr,  # [rows, columns], what only gated pairs have, [rows] twice
    codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr,  # as in `fp8_tiles`
    rows, columns, half, ignore_index, stride_row, stride_column, grad_stride_row, grad_stride_column,
    KIND: gl.constexpr, BY_ROWS: gl.constexpr, TURNED_BY_ROWS: gl.constexpr, LARGEST_CODE: gl.constexpr,
    BLOCK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = block_layout(ROWS, BLOCK, False)
    across = gl.cdiv(columns, BLOCK)
    tile_row = gl.program_id(0) // across
    tile_column = gl.program_id(0) % across
    first_row = tile_row.to(gl.int64) * BLOCK
    first_column = tile_column * BLOCK
    line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    of_row = first_row + line < rows
    inside = of_row[:, None] & (first_column + place < columns)[None, :]
    x_ptr += first_row * stride_row + first_column * stride_column
    logits = gl.load(x_ptr + line[:, None] * stride_row + place[None, :] * stride_column, mask=inside, other=0)
    lse = gl.load(lse_ptr + first_row + line, mask=of_row, other=0).to(gl.float32)
    label = gl.load(labels_ptr + first_row + line, mask=of_row, other=0)
    counts = (label != ignore_index) & of_row
    lse = gl.where((label >= 0) & (label < columns), lse, float("nan"))
    made = gl.exp(logits.to(gl.float32) - lse[:, None])
    made = gl.where(first_column + place[None, :] == label[:, None], made - 1.0, made)
    made = gl.where(inside & counts[:, None], made, 0.0)
    store_both_ways(
        made, codes_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows, columns, tile_row, tile_column,
        BY_ROWS, TURNED_BY_ROWS, LARGEST_CODE, BLOCK, ROWS,
    )  # fmt: skip


@implements(
    ops.cross_entropy_gradient_fp8_tiles,
    backend="gluon",
    repeat=straight_line,
    dtypes=dict(logits=HALVES),  # of lse any: it comes in float32
    when=lambda logits: holds_vectors(logits),
)
def cross_entropy_gradient_fp8_tiles(
    logits: Tensor, lse: Tensor, labels: Tensor, ignore_index: int, by: str, turned_by: str
) -> Made:
    programs = cdiv(logits.shape[0], BLOCK) * cdiv(logits.shape[1], BLOCK)
    return launch_made(
        code_loss_blocks_kernel, programs, "loss", logits, None, lse.contiguous(), labels.contiguous(),
        logits.shape[1], ignore_index, by, turned_by, E4M3, ROWS=ROWS, maxnreg=REGISTERS,
    )  # fmt: skip
