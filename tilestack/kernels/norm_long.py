"""Norms of rows too long for one program's registers; the mathematics is that of `norm`.

The forward walks a row in chunks twice: statistics, then output (the second read comes from L2). The backward first
finds each row's statistics and averages, then covers the matrix with column chunks,

    +-------+-------+-------+
    | (0,p) | (1,p) | (2,p) |   program (c, p) owns chunk c of rows p, p + P, …: it writes their dx
    +-------+-------+-------+   and adds up its chunk of dweight in registers
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.kernels.launch import accumulator, launch, multiprocessors

CHUNK = 16384  # columns per step of a walk along a row
STRIP = 4096  # columns per program of the backward


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
def norm_long_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    columns, x_stride, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    lane = tl.arange(0, CHUNK)
    mean, rstd = long_statistics(x_ptr, columns, eps, CENTRED, ACC, CHUNK)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        y = (tl.load(x_ptr + start + lane, mask=inside, other=0).to(ACC) - mean) * rstd
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + start + lane, mask=inside, other=0)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + start + lane, mask=inside, other=0)
        tl.store(out_ptr + row * columns + start + lane, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_long_averages_kernel(
    grad_ptr, x_ptr, weight_ptr, stats_ptr,
    columns, grad_stride, x_stride, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """stats[row] = mean, rstd, avg(g · x̂), avg(g)."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, CHUNK)
    mean, rstd = long_statistics(x_ptr, columns, eps, CENTRED, ACC, CHUNK)
    gx = tl.zeros([CHUNK], ACC)
    gs = tl.zeros([CHUNK], ACC)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        g = tl.load(grad_ptr + start + lane, mask=inside, other=0).to(ACC)
        if HAS_WEIGHT:
            g = g * tl.load(weight_ptr + start + lane, mask=inside, other=0)
        gx += g * (tl.load(x_ptr + start + lane, mask=inside, other=0).to(ACC) - mean) * rstd
        gs += g
    stats_ptr += row * 4
    tl.store(stats_ptr, mean)
    tl.store(stats_ptr + 1, rstd)
    tl.store(stats_ptr + 2, tl.sum(gx, 0) / columns)
    tl.store(stats_ptr + 3, tl.sum(gs, 0) / columns)


@triton.jit
def norm_long_bwd_kernel(
    grad_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, x_stride,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (column chunks, P): program p of a chunk takes rows p, p + P, …"""
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    program = tl.program_id(1).to(tl.int64)
    inside = column < columns
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0).to(ACC)
    dweight = tl.zeros([CHUNK], ACC)
    for row in range(program, rows, tl.num_programs(1)):
        mean = tl.load(stats_ptr + row * 4)
        rstd = tl.load(stats_ptr + row * 4 + 1)
        x = (tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(ACC) - mean) * rstd
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(ACC)
        if HAS_WEIGHT:
            dweight += grad * x
            g = grad * weight
        else:
            g = grad
        dx = g - x * tl.load(stats_ptr + row * 4 + 2)
        if CENTRED:
            dx = dx - tl.load(stats_ptr + row * 4 + 3)
        tl.store(dx_ptr + row * columns + column, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * columns + column, dweight, mask=inside)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, eps: float, flags: dict) -> None:
    rows, columns = x.shape
    launch(
        norm_long_fwd_kernel, (rows,), x, weight, bias, out, columns, x.stride(0), eps,
        **flags, ACC=accumulator(x.dtype), CHUNK=CHUNK, num_warps=32,
    )  # fmt: skip


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, dx: Tensor, eps: float, flags: dict) -> Tensor:
    """Writes dx; returns dweight in shares still to be summed, [1, P, columns] ([0, P, columns] without a weight)."""
    rows, columns = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    programs = min(rows, max(1, 4 * multiprocessors(x.device) // triton.cdiv(columns, STRIP)))
    stats = torch.empty((rows, 4), dtype=wide, device=x.device)
    partial = torch.empty((int(weight is not None), programs, columns), dtype=wide, device=x.device)
    launch(
        norm_long_averages_kernel, (rows,), grad, x, weight, stats, columns, grad.stride(0), x.stride(0), eps,
        **flags, CHUNK=CHUNK, num_warps=32,
    )  # fmt: skip
    launch(
        norm_long_bwd_kernel, (triton.cdiv(columns, STRIP), programs), grad, x, weight, stats, dx, partial, rows, columns, grad.stride(0), x.stride(0),
        **flags, CHUNK=STRIP, num_warps=8,
    )  # fmt: skip
    return partial
