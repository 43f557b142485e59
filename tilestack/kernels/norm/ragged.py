"""Norms of rows that do not start on 16 bytes; the mathematics is that of `rows.py`, the tiles are those of `granules.py`.

A fixed set of programs strides over the rows in both directions: each has its columns' weights in registers, and in the
backward their gradients, which it writes once to its own line of a buffer. Bodies are copied to shared memory some rows
ahead. Ends of 2-byte elements cannot be: in the forward, which waits for little else, they are loaded a row ahead. There a
column's weight and bias share a register, so that registers suffice for four programs on a multiprocessor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.norm.granules import (
    body_width,
    granule_of,
    load_body,
    load_columns,
    load_ends,
    load_ragged,
    programs_that_stride,
    ragged,
    store_ragged,
    sum_ragged,
)
from tilestack.kernels.norm.order_free import (
    extremes,
    farthest,
    larger,
    larger_and_smaller,
    largest,
    sum_of_granules,
)
from tilestack.kernels.quantised.codes import codes_of, magnitudes, scale_of
from tilestack.kernels.tiles import INTERPRETED, multiprocessors, shared_memory, wide

NARROWEST_RAGGED = 1024  # columns; several shorter rows share a tile, in `rows.py`
WIDEST_BODY = 8192  # columns of a body that fit in registers with all that is held of them
ELEMENTS = 1024  # of a body in a warp
FORWARD_WARPS = 16  # on each multiprocessor
BACKWARD_WARPS = 8
STAGES = 3  # a row at work and the others on their way


@triton.jit
def ragged_statistics(x, x_ends, places, columns, eps, CENTRED: tl.constexpr, FINE: tl.constexpr):
    """(x - mean, or x itself) of body and ends, and 1 / std; to the bit the same wherever the body begins."""
    _, inside, _, end_inside = places
    if CENTRED:
        high, low = extremes(x, x, 1, True)
        high, low = extremes(tl.where(inside, high, float("-inf")), tl.where(inside, low, float("inf")))
        ends = extremes(tl.where(end_inside, x_ends, float("-inf")), tl.where(end_inside, x_ends, float("inf")))
        high, low = larger_and_smaller(high, low, ends[0], ends[1])
        centre = sum_of_granules(x, x_ends, farthest(high, low, 0.0), False, FINE) / columns
        x, x_ends = x - tl.where(inside, centre, 0.0), x_ends - tl.where(end_inside, centre, 0.0)
        reach = farthest(high, low, centre)
    else:
        reach = larger(largest(tl.abs(x)), largest(tl.abs(x_ends)))
    return x, x_ends, tl.rsqrt(sum_of_granules(x, x_ends, reach * reach, True, FINE) / columns + eps)


@triton.jit
def paired(weight, bias):
    """Two numbers of 16 bits each as one of 32."""
    return (
        weight.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | bias.to(tl.int16, bitcast=True).to(tl.int32) << 16
    )  # fmt: skip


@triton.jit
def unpaired(pairs, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """The two again, as float32."""
    if not INTERPRETED:  # the compiler is not to know that they are the same for every row: it would keep them unpaired
        pairs = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pairs], dtype=tl.int32, is_pure=False, pack=1)
    if tl.bfloat16 == WEIGHT:  # the upper half of a float32
        weight = (pairs << 16).to(tl.float32, bitcast=True)
    else:
        weight = pairs.to(tl.int16).to(WEIGHT, bitcast=True).to(tl.float32)
    if tl.bfloat16 == BIAS:
        bias = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        bias = (pairs >> 16).to(tl.int16).to(BIAS, bitcast=True).to(tl.float32)
    return weight, bias


@triton.jit
def norm_ragged_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, scale_ptr,
    rows, columns, x_stride, residual_stride, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr, PAIRED: tl.constexpr, BODY: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = x_ptr.dtype.element_ty != tl.bfloat16
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    places = ragged(tl.program_id(0), columns, BODY, V)
    if HAS_WEIGHT:
        weight, weight_ends = load_columns(weight_ptr, places)
    if HAS_BIAS:
        bias, bias_ends = load_columns(bias_ptr, places)
    if PAIRED:
        pairs = paired(weight, bias)
    next_ends = load_ends(x_ptr, program, rows, x_stride, places)
    if HAS_RESIDUAL:
        next_residual_ends = load_ends(residual_ptr, program, rows, residual_stride, places)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        x, x_ends = wide(load_body(x_ptr, row, x_stride, places, V)), wide(next_ends)
        next_ends = load_ends(x_ptr, row + programs, rows, x_stride, places)
        if HAS_RESIDUAL:
            rounded = (x + wide(load_body(residual_ptr, row, residual_stride, places, V))).to(sum_ptr.dtype.element_ty)
            rounded_ends = (x_ends + wide(next_residual_ends)).to(sum_ptr.dtype.element_ty)
            next_residual_ends = load_ends(residual_ptr, row + programs, rows, residual_stride, places)
            store_ragged(sum_ptr, row, columns, rounded, rounded_ends, places, V)
            x, x_ends = wide(rounded), wide(rounded_ends)
        x, x_ends, rstd = ragged_statistics(x, x_ends, places, columns, eps, CENTRED, FINE)
        y, y_ends = x * rstd, x_ends * rstd
        if PAIRED:
            factor, shift = unpaired(pairs, weight_ptr.dtype.element_ty, bias_ptr.dtype.element_ty)
            y, y_ends = y * factor + shift, y_ends * weight_ends + bias_ends
        else:
            if HAS_WEIGHT:
                y, y_ends = y * wide(weight), y_ends * weight_ends
            if HAS_BIAS:
                y, y_ends = y + wide(bias), y_ends + bias_ends
        if LARGEST_CODE:
            scale = scale_of(tl.maximum(tl.max(magnitudes(y)), tl.max(magnitudes(y_ends), 0)), LARGEST_CODE)
            tl.store(scale_ptr + row, scale)
            y = codes_of(y, scale, out_ptr.dtype.element_ty)
            y_ends = codes_of(y_ends, scale, out_ptr.dtype.element_ty)
        store_ragged(out_ptr, row, columns, y, y_ends, places, V)


@triton.jit
def norm_ragged_bwd_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, grad_sum_stride, x_stride, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, BODY: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    places = ragged(program, columns, BODY, V)
    if HAS_WEIGHT:
        weight, weight_ends = load_columns(weight_ptr, places)
        weight = wide(weight)
    dweight, dweight_ends = tl.zeros([BODY // V, V], ACC), tl.zeros([2 * V], ACC)
    dbias, dbias_ends = tl.zeros([BODY // V, V], ACC), tl.zeros([2 * V], ACC)
    for row in tl.range(program.to(tl.int64), rows, tl.num_programs(0), num_stages=STAGES):
        x, x_ends = load_ragged(x_ptr, row, x_stride, places, ACC, V)
        grad, grad_ends = load_ragged(grad_ptr, row, grad_stride, places, ACC, V)
        if CENTRED:
            centre = sum_ragged(x, x_ends) / columns
            x, x_ends = x - tl.where(places[1], centre, 0.0), x_ends - tl.where(places[3], centre, 0.0)
        rstd = tl.rsqrt(sum_ragged(x * x, x_ends * x_ends) / columns + eps)
        g, g_ends = grad, grad_ends
        if HAS_WEIGHT:
            g, g_ends = grad * weight.to(ACC), grad_ends * weight_ends.to(ACC)
        along = sum_ragged(g * x, g_ends * x_ends) * rstd / columns
        x, x_ends = x * rstd, x_ends * rstd
        if HAS_WEIGHT:
            dweight += grad * x
            dweight_ends += grad_ends * x_ends
        if HAS_BIAS:
            dbias += grad
            dbias_ends += grad_ends
        dx, dx_ends = g - x * along, g_ends - x_ends * along
        if CENTRED:
            mean = sum_ragged(g, g_ends) / columns
            dx, dx_ends = dx - mean, dx_ends - mean
        dx, dx_ends = dx * rstd, dx_ends * rstd
        if HAS_RESIDUAL:
            more, more_ends = load_ragged(grad_sum_ptr, row, grad_sum_stride, places, ACC, V)
            dx, dx_ends = dx + more, dx_ends + more_ends
        store_ragged(dx_ptr, row, columns, dx, dx_ends, places, V)
    if HAS_WEIGHT:
        store_ragged(partial_ptr, program, columns, dweight, dweight_ends, places, V)
    if HAS_BIAS:
        store_ragged(partial_ptr, tl.num_programs(0) + program, columns, dbias, dbias_ends, places, V)


def granule(columns: int, element_size: int, *matrices: Tensor | None) -> int:
    """V of rows that belong here, 0 of others; those of float64 do not, for which registers do not suffice."""
    if columns < NARROWEST_RAGGED or element_size == 8:
        return 0
    found = granule_of(columns, element_size, *matrices)
    return found if found and body_width(columns, found) <= WIDEST_BODY else 0


def forward(
    tensors: tuple[Tensor | None, ...], columns: int, strides: tuple[int, int], eps: float, flags: dict, granule: int
) -> None:
    """`tensors` are those of the kernel."""
    x = tensors[0]
    assert x is not None
    shape, programs = launch_shape(x, granule, FORWARD_WARPS, STAGES, 1 + flags["HAS_RESIDUAL"])
    of_columns = [vector for vector in tensors[2:4] if vector is not None]
    paired = len(of_columns) == 2 and all(vector.element_size() == 2 for vector in of_columns)
    launch(
        norm_ragged_fwd_kernel, (programs,), *tensors, x.shape[0], columns, *strides, eps,
        **flags, PAIRED=paired, **shape,
    )  # fmt: skip


def backward(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor,
    strides: tuple[int, int, int],
    eps: float,
    flags: dict,
    granule: int,
) -> Tensor:
    """Writes dx; returns dweight and dbias, as far as there are any, in shares still to be summed: [0 to 2, P, columns]."""
    x = tensors[2]
    rows, columns = x.shape
    # With all that can be added up or loaded, registers do not suffice for a deeper pipeline.
    stages = 2 if flags["HAS_BIAS"] and flags["HAS_RESIDUAL"] else STAGES
    shape, programs = launch_shape(x, granule, BACKWARD_WARPS, stages, 2 + flags["HAS_RESIDUAL"])
    sums = flags["HAS_WEIGHT"] + flags["HAS_BIAS"]
    partial = torch.empty((sums, programs, columns), dtype=torch.float32, device=x.device)
    launch(
        norm_ragged_bwd_kernel, (programs,), *tensors, dx, partial, rows, columns, *strides, eps, **flags, **shape
    )  # fmt: skip
    return partial


def launch_shape(x: Tensor, granule: int, most_warps: int, stages: int, loaded: int) -> tuple[dict[str, int], int]:
    """A kernel's constants, and how many programs stride over the rows; each loads a row of so many matrices at a time."""
    rows, columns = x.shape
    body = body_width(columns, granule)
    warps = max(body // ELEMENTS, 2)
    resident = most_warps // warps
    fitting = 1 + shared_memory(x.device) // (resident * loaded * body * x.element_size())
    programs = programs_that_stride(rows, resident * multiprocessors(x.device), granule)
    return dict(BODY=body, V=granule, STAGES=min(stages, fitting), num_warps=warps), programs
