"""Gated activation kernels: out = activate(gate) · up, and both gradients in one pass.

    dgate = grad · up · slope(gate)        dup = grad · activate(gate)

Gate and up are matrices whose rows may lie apart, so that the halves of one tensor are read where they are:

    [gate | up]          two tiles, half a row apart               gate up gate up …    one tile, twice as wide,
    |--- COLS ---| … |--- COLS ---|                               |---- 2 COLS ----|    split in registers

The backward writes its two results the same way, into one tensor, and on demand the forward's result once more, for
which it has all at hand. Tensors that are dense are taken as one long row.
A tile is masked only where it reaches past the end, for the reason told in `elementwise`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate, gelu_name, slope
from tilestack.kernels.tiles import cdiv, next_power, rows_of, wide
from tilestack.ops.gated import halves

TILE = 2048  # elements of gate that a program takes
RAGGED_TILE = 1024  # of rows that may begin off 16 bytes, whose elements move one by one
VECTOR = 16  # elements: rows so far apart, or a multiple of it, are known to the compiler to begin on 16 bytes


@triton.jit
def tile_of_matrix(rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's (row, first column, whether the tile lies wholly inside); tiles are counted along rows."""
    across = tl.cdiv(columns, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS
    start = (tl.program_id(0) % across).to(tl.int64) * COLS
    return row + tl.arange(0, ROWS)[:, None], start, (row + ROWS <= rows) & (start + COLS <= columns)


@triton.jit
def load_tile(pointer, row, start, whole, rows, columns, stride, COLS: tl.constexpr):
    column = start + tl.arange(0, COLS)[None, :]
    if whole:
        x = tl.load(pointer + row * stride + column)
    else:
        x = tl.load(pointer + row * stride + column, mask=(row < rows) & (column < columns), other=0)
    return wide(x)


@triton.jit
def store_tile(pointer, value, row, start, whole, rows, columns, stride, COLS: tl.constexpr):
    column = start + tl.arange(0, COLS)[None, :]
    value = value.to(pointer.dtype.element_ty)
    if whole:
        tl.store(pointer + row * stride + column, value)
    else:
        tl.store(pointer + row * stride + column, value, mask=(row < rows) & (column < columns))


@triton.jit
def load_halves(
    gate_ptr, up_ptr, row, start, whole, rows, columns, gate_stride, up_stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        both = load_tile(gate_ptr, row, 2 * start, whole, rows, 2 * columns, gate_stride, 2 * COLS)
        gate, up = tl.split(tl.reshape(both, [ROWS, COLS, 2]))
    else:
        gate = load_tile(gate_ptr, row, start, whole, rows, columns, gate_stride, COLS)
        up = load_tile(up_ptr, row, start, whole, rows, columns, up_stride, COLS)
    return gate, up


@triton.jit
def gated_fwd_kernel(
    gate_ptr, up_ptr, out_ptr,  # [rows, columns] each; interleaved, gate is [rows, 2 · columns] and up unused
    rows, columns, out_stride, gate_stride, up_stride,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = tile_of_matrix(rows, columns, ROWS, COLS)
    gate, up = load_halves(
        gate_ptr, up_ptr, row, start, whole, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, COLS
    )
    HALF: tl.constexpr = gate_ptr.dtype.element_ty.primitive_bitwidth == 16
    store_tile(out_ptr, activate(gate, KIND, HALF) * up, row, start, whole, rows, columns, out_stride, COLS)


@triton.jit
def gated_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, out_ptr,  # out, [rows, columns] and dense, may be None
    rows, columns, grad_stride, gate_stride, up_stride, d_stride,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = tile_of_matrix(rows, columns, ROWS, COLS)
    grad = load_tile(grad_ptr, row, start, whole, rows, columns, grad_stride, COLS)
    gate, up = load_halves(
        gate_ptr, up_ptr, row, start, whole, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, COLS
    )
    HALF: tl.constexpr = gate_ptr.dtype.element_ty.primitive_bitwidth == 16
    active = activate(gate, KIND, HALF)
    dgate = grad * up * slope(gate, KIND, HALF)
    dup = grad * active
    if OUT:
        store_tile(out_ptr, active * up, row, start, whole, rows, columns, columns, COLS)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dgate, dup), [ROWS, 2 * COLS])
        store_tile(dgate_ptr, both, row, 2 * start, whole, rows, 2 * columns, d_stride, 2 * COLS)
    else:
        store_tile(dgate_ptr, dgate, row, start, whole, rows, columns, d_stride, COLS)
        store_tile(dup_ptr, dup, row, start, whole, rows, columns, d_stride, COLS)


@functools.lru_cache(1 << 14)
def tiles_over(rows: int, columns: int, *strides: int) -> tuple[tuple[int], dict[str, int]]:
    """(grid, tile) that cover matrices: a width that divides the rows without rest where a good one does."""
    elements = RAGGED_TILE if any(stride % VECTOR for stride in strides) else TILE
    even = columns & -columns
    width = min(even if even >= 512 else next_power(max(columns, 1)), elements)
    height = elements // width if rows > 1 else 1
    return (cdiv(rows, height) * cdiv(columns, width),), dict(ROWS=height, COLS=width)


def layout(*matrices: Tensor) -> tuple[int, ...]:
    """(rows, columns) of the first of some matrices, and how far apart the rows of each lie; zero apart if there is one row.

    So the compiler knows a single row to start on 16 bytes.
    """
    rows, columns = matrices[0].shape
    return rows, columns, *(matrix.stride(0) if rows > 1 else 0 for matrix in matrices)


def gated(gate: Tensor, up: Tensor, out: Tensor, layout: tuple[int, ...], kind: str, interleaved: bool = False) -> None:
    """Write activate(gate) · up into out, all with (rows, columns, and the strides of out, gate and up); interleaved, gate holds both."""
    grid, tile = tiles_over(*layout)
    launch(gated_fwd_kernel, grid, gate, up, out, *layout, KIND=kind, INTERLEAVED=interleaved, **tile)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor,
    dup: Tensor,
    layout: tuple[int, ...],
    kind: str,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> None:
    """Write both gradients, with (rows, columns, and the strides of grad, gate, up and either result); interleaved, dgate takes both.

    With `out` also what the forward wrote.
    """
    grid, tile = tiles_over(*layout)
    launch(
        gated_bwd_kernel, grid, grad, gate, up, dgate, dup, out, *layout,
        KIND=kind, INTERLEAVED=interleaved, OUT=out is not None, **tile,
    )  # fmt: skip


def two_tensors(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if gate.is_contiguous() and up.is_contiguous():
        gated(gate, up, out, (1, gate.numel(), 0, 0, 0), kind)
    else:
        gate, up = rows_of(gate), rows_of(up)
        gated(gate, up, out, layout(out.view(gate.shape), gate, up), kind)
    return out


def two_tensors_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if grad.is_contiguous() and gate.is_contiguous() and up.is_contiguous():
        gated_backward(grad, gate, up, dgate, dup, (1, gate.numel(), 0, 0, 0, 0), kind)
    else:
        grad, gate, up = rows_of(grad), rows_of(gate), rows_of(up)
        gated_backward(grad, gate, up, dgate, dup, layout(grad, gate, up, dgate.view(gate.shape)), kind)
    return dgate, dup


def one_tensor(x: Tensor, kind: str, interleaved: bool) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    source = rows_of(x)
    gate, up = (source, source) if interleaved else halves(source, interleaved)
    target = rows_of(out)
    gated(gate, up, target, layout(target, gate, up), kind, interleaved)
    return out


def one_tensor_backward(grad: Tensor, x: Tensor, kind: str, interleaved: bool, out: Tensor | None = None) -> Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad, source, target = rows_of(grad), rows_of(x), rows_of(dx)
    gate, up = (source, source) if interleaved else halves(source, interleaved)
    dgate, dup = (target, target) if interleaved else halves(target, interleaved)
    gated_backward(grad, gate, up, dgate, dup, layout(grad, gate, up, dgate), kind, interleaved, out)
    return dx


@implements(
    ops.silu_mul,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, gate, up: two_tensors_backward(grad, gate, up, "silu"),
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return two_tensors(gate, up, "silu")


@implements(
    ops.gelu_mul,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, gate, up, approximate: two_tensors_backward(grad, gate, up, gelu_name(approximate)),
)
def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return two_tensors(gate, up, gelu_name(approximate))


@implements(
    ops.swiglu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x, interleaved: one_tensor_backward(grad, x, "silu", interleaved),
)
def swiglu(x: Tensor, interleaved: bool) -> Tensor:
    return one_tensor(x, "silu", interleaved)


@implements(
    ops.geglu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x, approximate, interleaved: one_tensor_backward(
        grad, x, gelu_name(approximate), interleaved
    ),
)
def geglu(x: Tensor, approximate: str, interleaved: bool) -> Tensor:
    return one_tensor(x, gelu_name(approximate), interleaved)
