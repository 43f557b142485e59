"""Norms of rows too long for one program's registers; the mathematics is that of `rows.py`.

The forward walks a row in chunks twice: statistics, then output (the second read comes from L2); a sum with a residual is
written on the way before, and the scale of quantised rows takes one more walk. The backward first finds each row's statistics and averages, then covers the matrix with column chunks,

    +-------+-------+-------+
    | (0,p) | (1,p) | (2,p) |   program (c, p) owns chunk c of rows p, p + P, …: it writes their dx
    +-------+-------+-------+   and adds up its chunk of dweight in registers
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.norm.averages import row_averages
from tilestack.kernels.quantised.codes import codes_of, magnitudes, scale_of
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, shared_memory, widened

CHUNK = 16384  # columns per step of a walk along a row
AVERAGED, AVERAGED_WARPS, AVERAGED_STAGES = 2048, 4, 4  # columns per step of the walk that finds a row's averages
STRIP, STRIP_WARPS, STRIP_STAGES = 2048, 8, 4  # columns per program of the backward
STRIP_PROGRAMS = 4  # of the backward for each multiprocessor


@triton.jit
def long_statistics(x_ptr, columns, eps, CENTRED: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr):
    """Mean and 1 / std of one row read in chunks, merging each chunk's mean and squared deviations into the whole's."""
    lane = tl.arange(0, CHUNK)
    mean = tl.zeros([], ACC)
    squares = tl.zeros([], ACC)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=0).to(ACC)
        if CENTRED:
            count = tl.minimum(columns - start, CHUNK)
            chunk_mean = tl.sum(x, 0) / count
            x = tl.where(inside, x - chunk_mean, 0.0)
            share = count / (start + count).to(ACC)
            step = chunk_mean - mean
            squares += step * step * start * share
            mean += step * share
        squares += tl.sum(x * x, 0)
    return mean, tl.rsqrt(squares / columns + eps)


@triton.jit
def normal_chunk(
    x_ptr, weight_ptr, bias_ptr, column, inside, mean, rstd,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    y = (tl.load(x_ptr + column, mask=inside, other=0).to(ACC) - mean) * rstd
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + column, mask=inside, other=0)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + column, mask=inside, other=0)
    return y


@triton.jit
def norm_long_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, scale_ptr,
    columns, x_stride, residual_stride, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * columns
    lane = tl.arange(0, CHUNK)
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride
        sum_ptr += row * columns
        for start in range(0, columns, CHUNK):
            inside = start + lane < columns
            summed = tl.load(x_ptr + start + lane, mask=inside, other=0).to(ACC)
            summed += tl.load(residual_ptr + start + lane, mask=inside, other=0).to(ACC)
            tl.store(sum_ptr + start + lane, summed.to(sum_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # a thread may read below what another has written
        x_ptr = sum_ptr
    mean, rstd = long_statistics(x_ptr, columns, eps, CENTRED, ACC, CHUNK)
    if LARGEST_CODE:
        largest = tl.zeros([CHUNK], ACC)
        for start in range(0, columns, CHUNK):
            column = start + lane
            y = normal_chunk(
                x_ptr, weight_ptr, bias_ptr, column, column < columns, mean, rstd, HAS_WEIGHT, HAS_BIAS, ACC
            )
            largest = tl.maximum(largest, tl.where(column < columns, magnitudes(y), 0.0))
        scale = scale_of(tl.max(largest, 0), LARGEST_CODE)
        tl.store(scale_ptr + row, scale)
    for start in range(0, columns, CHUNK):
        column = start + lane
        inside = column < columns
        y = normal_chunk(x_ptr, weight_ptr, bias_ptr, column, inside, mean, rstd, HAS_WEIGHT, HAS_BIAS, ACC)
        if LARGEST_CODE:
            tl.store(out_ptr + column, codes_of(y, scale, out_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_long_averages_kernel(
    grad_ptr, x_ptr, weight_ptr, stats_ptr,
    columns, grad_stride, x_stride, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """stats[row] = mean, rstd, avg(g · x̂), avg(g)."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd, product, average = row_averages(
        x_ptr + row * x_stride, grad_ptr + row * grad_stride, weight_ptr, columns, eps,
        CENTRED, HAS_WEIGHT, ACC, CHUNK, STAGES,
    )  # fmt: skip
    stats_ptr += row * 4
    tl.store(stats_ptr, mean)
    tl.store(stats_ptr + 1, rstd)
    tl.store(stats_ptr + 2, product)
    tl.store(stats_ptr + 3, average)


@triton.jit
def norm_long_bwd_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, grad_sum_stride, x_stride,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (column chunks, P): program p of a chunk takes rows p, p + P, … counted from the last, which the caches may have."""
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    program = tl.program_id(1).to(tl.int64)
    inside = column < columns
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0).to(ACC)
    dweight = tl.zeros([CHUNK], ACC)
    dbias = tl.zeros([CHUNK], ACC)
    for back in tl.range(program, rows, tl.num_programs(1), num_stages=STAGES):
        row = rows - 1 - back
        mean = tl.load(stats_ptr + row * 4)
        rstd = tl.load(stats_ptr + row * 4 + 1)
        x = (tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(ACC) - mean) * rstd
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(ACC)
        if HAS_WEIGHT:
            dweight += grad * x
            g = grad * weight
        else:
            g = grad
        if HAS_BIAS:
            dbias += grad
        dx = g - x * tl.load(stats_ptr + row * 4 + 2)
        if CENTRED:
            dx = dx - tl.load(stats_ptr + row * 4 + 3)
        dx = dx * rstd
        if HAS_RESIDUAL:
            dx += tl.load(grad_sum_ptr + row * grad_sum_stride + column, mask=inside, other=0).to(ACC)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * columns + column, dweight, mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + (tl.num_programs(1) + program) * columns + column, dbias, mask=inside)


def forward(
    tensors: tuple[Tensor | None, ...], columns: int, strides: tuple[int, int], eps: float, flags: dict
) -> None:
    """`tensors` are those of the kernel."""
    x = tensors[0]
    assert x is not None
    launch(
        norm_long_fwd_kernel, (x.shape[0],), *tensors, columns, *strides, eps,
        **flags, ACC=accumulator(x.dtype), CHUNK=CHUNK, num_warps=32,
    )  # fmt: skip


def backward(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor,
    strides: tuple[int, int, int],
    eps: float,
    flags: dict,
) -> Tensor:
    """Writes dx; returns dweight and dbias, as far as there are any, in shares still to be summed: [0 to 2, P, columns]."""
    grad, _, x, weight = tensors
    rows, columns = x.shape
    programs = min(rows, max(1, STRIP_PROGRAMS * multiprocessors(x.device) // cdiv(columns, STRIP)))
    stats = torch.empty((rows, 4), dtype=widened(x.dtype), device=x.device)
    sums = flags["HAS_WEIGHT"] + flags["HAS_BIAS"]
    partial = torch.empty((sums, programs, columns), dtype=widened(x.dtype), device=x.device)
    averaged = {name: flags[name] for name in ("CENTRED", "HAS_WEIGHT", "ACC")}
    # A tile of each tensor that is read, for each stage but the one at work.
    fitting = lambda tile, tensors: 1 + shared_memory(x.device) // (tile * tensors * x.element_size())
    launch(
        norm_long_averages_kernel, (rows,), grad, x, weight, stats, columns, strides[0], strides[2], eps,
        **averaged, CHUNK=AVERAGED, STAGES=min(AVERAGED_STAGES, fitting(AVERAGED, 3)), num_warps=AVERAGED_WARPS,
    )  # fmt: skip
    launch(
        norm_long_bwd_kernel, (cdiv(columns, STRIP), programs), *tensors, stats, dx, partial, rows, columns, *strides,
        **flags, CHUNK=STRIP, STAGES=min(STRIP_STAGES, fitting(STRIP, 3)), num_warps=STRIP_WARPS,
    )  # fmt: skip
    return partial
