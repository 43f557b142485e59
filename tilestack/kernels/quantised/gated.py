"""Gated activation with quantised rows: the product stays in registers until its row's largest magnitude is known.

gate, up: one read   →   y = silu(gate) · up, max |y| over the row   →   codes: one write of a byte an element
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, codes_of, magnitudes, scale_of, writes_fp8
from tilestack.kernels.tiles import cdiv, rows_of, tile_of_rows, wide
from tilestack.ops.quantised import LARGEST_CODE

WIDEST_QUANTISED = 32768  # columns that one program keeps in registers


@triton.jit
def gated_quantised_fwd_kernel(
    gate_ptr, up_ptr, codes_ptr, scale_ptr,  # [rows, columns] three times, [rows]
    rows, columns, gate_stride, up_stride,
    KIND: tl.constexpr, LARGEST_CODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    gate = wide(tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0))
    up = wide(tl.load(up_ptr + row * up_stride + column, mask=inside, other=0))
    y = activate(gate, KIND, gate_ptr.dtype.element_ty.primitive_bitwidth == 16) * up
    scale = scale_of(tl.max(magnitudes(y), 1, keep_dims=True), LARGEST_CODE)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(codes_ptr + row * columns + column, codes_of(y, scale, codes_ptr.dtype.element_ty), mask=inside)


def in_registers(gate: Tensor) -> bool | str:
    return (
        gate.shape[-1] <= WIDEST_QUANTISED
        or f"rows of {gate.shape[-1]} columns do not fit in registers, {WIDEST_QUANTISED} do"
    )


def in_registers_as_fp8(gate: Tensor) -> bool | str:
    return reason if (reason := in_registers(gate)) is not True else writes_fp8(gate)


def quantised(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(gate.shape[:-1], dtype=torch.float32, device=gate.device)
    gate, up = rows_of(gate), rows_of(up)
    rows, columns = gate.shape
    height, width, warps = tile_of_rows(columns)
    launch(
        gated_quantised_fwd_kernel, (cdiv(rows, height),), gate, up, codes, scale, rows, columns, gate.stride(0), up.stride(0),
        KIND="silu", LARGEST_CODE=LARGEST_CODE[dtype], ROWS=height, COLS=width, num_warps=warps,
    )  # fmt: skip
    return codes, scale


@implements(
    ops.silu_mul_int8,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    when=in_registers,
)
def silu_mul_int8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(gate, up, torch.int8)


@implements(
    ops.silu_mul_fp8,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    when=in_registers_as_fp8,
)
def silu_mul_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(gate, up, torch.float8_e4m3fn)
