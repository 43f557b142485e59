"""RMSNorm and LayerNorm kernels: one pair for both, RMSNorm being LayerNorm that neither centres nor shifts.

With x̂ = (x - mean) · rstd, the forward is y = x̂ · weight + bias. With g = grad · weight and averages over the row,

    dx = rstd · (g - x̂ · avg(g · x̂) - avg(g))        dweight = Σ_rows grad · x̂        dbias = Σ_rows grad

(RMSNorm drops the mean and avg(g)). Nothing is kept from the forward but x: the backward has the row in registers
anyway and finds its statistics again for free. A fixed set of backward programs stride over the rows,

    program 0: row 0, row P, row 2P, …      each adds its share of dweight in registers
    program 1: row 1, row P+1, …            and writes it once, to line p of a [P, columns] buffer

which a second kernel sums down: no atomics, so the result is the same in every run. Rows too long for registers are
walked in chunks, statistics first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.launch import accumulator, launch, programs_that_fit, rows_of, tile_of_rows, wide
from tilestack.ops import implements

WIDEST = 32768  # columns the forward keeps in registers
WIDEST_BACKWARD = 16384  # the backward holds x, grad and two running sums
CHUNK = 4096  # columns per step of the long-row kernels


@triton.jit
def statistics(x, inside, columns, eps, CENTRED: tl.constexpr):
    """(x - mean, or x itself) and 1 / std of each row of a tile."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / columns, 0.0)
    return x, tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / columns + eps)


@triton.jit
def norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, columns, x_stride, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row * x_stride + column, mask=inside, other=0))
    x, rstd = statistics(x, inside, columns, eps, CENTRED)
    y = x * rstd
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + column, mask=column < columns, other=0)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + column, mask=column < columns, other=0)
    tl.store(out_ptr + row * columns + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_bwd_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, x_stride, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLS)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0).to(ACC)
    dweight = tl.zeros([ROWS, COLS], ACC)
    dbias = tl.zeros([ROWS, COLS], ACC)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(ACC)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(ACC)
        x, rstd = statistics(x, inside, columns, eps, CENTRED)
        x = x * rstd
        if HAS_WEIGHT:
            dweight += grad * x
            g = grad * weight
        else:
            g = grad
        if HAS_BIAS:
            dbias += grad
        dx = g - x * (tl.sum(g * x, 1, keep_dims=True) / columns)
        if CENTRED:
            dx = dx - tl.sum(g, 1, keep_dims=True) / columns
        tl.store(dx_ptr + row * columns + column, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    line = tl.arange(0, COLS)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * columns + line, tl.sum(dweight, 0), mask=line < columns)
    if HAS_BIAS:
        tl.store(partial_ptr + (tl.num_programs(0) + program) * columns + line, tl.sum(dbias, 0), mask=line < columns)


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, lines, columns, LINES: tl.constexpr, COLS: tl.constexpr):
    """out[which, column] = sum of the lines of partial[which]; which is the second grid axis."""
    which = tl.program_id(1)
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([LINES, COLS], partial_ptr.dtype.element_ty)
    for start in range(0, lines, LINES):
        line = start + tl.arange(0, LINES)[:, None]
        total += tl.load(
            partial_ptr + (which * lines + line) * columns + column, mask=(line < lines) & (column < columns), other=0
        )
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + which * columns + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < columns)


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
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (column chunks, P): program p of a chunk takes rows p, p + P, …"""
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    program = tl.program_id(1).to(tl.int64)
    inside = column < columns
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0).to(ACC)
    dweight = tl.zeros([CHUNK], ACC)
    dbias = tl.zeros([CHUNK], ACC)
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
        if HAS_BIAS:
            dbias += grad
        dx = g - x * tl.load(stats_ptr + row * 4 + 2)
        if CENTRED:
            dx = dx - tl.load(stats_ptr + row * 4 + 3)
        tl.store(dx_ptr + row * columns + column, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * columns + column, dweight, mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + (tl.num_programs(1) + program) * columns + column, dbias, mask=inside)


def norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    source = rows_of(x)
    rows, columns = source.shape
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    flags = dict(CENTRED=centred, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None)
    if columns <= WIDEST:
        height, width, warps = tile_of_rows(columns)
        launch(
            norm_fwd_kernel,
            (triton.cdiv(rows, height),),
            source,
            weight,
            bias,
            out,
            rows,
            columns,
            source.stride(0),
            float(eps),
            **flags,
            ROWS=height,
            COLS=width,
            num_warps=warps,
        )
    else:
        launch(
            norm_long_fwd_kernel,
            (rows,),
            source,
            weight,
            bias,
            out,
            columns,
            source.stride(0),
            float(eps),
            **flags,
            ACC=accumulator(x.dtype),
            CHUNK=CHUNK,
            num_warps=8,
        )
    return out


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias."""
    source, arriving = rows_of(x), rows_of(grad)
    weight = None if weight is None else weight.contiguous()
    rows, columns = source.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    acc = accumulator(x.dtype)
    flags = dict(CENTRED=centred, HAS_WEIGHT=weight is not None, ACC=acc)
    sums = (weight is not None) + (bias is not None)
    scratch = torch.float64 if x.dtype == torch.float64 else torch.float32
    if columns <= WIDEST_BACKWARD:
        height, width, warps = tile_of_rows(columns, per_warp=1024)
        programs = min(triton.cdiv(rows, height), programs_that_fit(x) * max(1, 16 // warps))
        partial = torch.empty((sums, programs, columns), dtype=scratch, device=x.device)
        launch(
            norm_bwd_kernel,
            (programs,),
            arriving,
            source,
            weight,
            dx,
            partial,
            rows,
            columns,
            arriving.stride(0),
            source.stride(0),
            float(eps),
            **flags,
            HAS_BIAS=bias is not None,
            ROWS=height,
            COLS=width,
            STAGES=2,
            num_warps=warps,
        )
    else:
        programs = min(rows, max(1, programs_that_fit(x) * 4 // triton.cdiv(columns, CHUNK)))
        stats = torch.empty((rows, 4), dtype=scratch, device=x.device)
        partial = torch.empty((sums, programs, columns), dtype=scratch, device=x.device)
        launch(
            norm_long_averages_kernel,
            (rows,),
            arriving,
            source,
            weight,
            stats,
            columns,
            arriving.stride(0),
            source.stride(0),
            float(eps),
            **flags,
            CHUNK=CHUNK,
            num_warps=8,
        )
        launch(
            norm_long_bwd_kernel,
            (triton.cdiv(columns, CHUNK), programs),
            arriving,
            source,
            weight,
            stats,
            dx,
            partial,
            rows,
            columns,
            arriving.stride(0),
            source.stride(0),
            **flags,
            HAS_BIAS=bias is not None,
            CHUNK=CHUNK,
            num_warps=8,
        )
    if weight is None:
        return dx, None, None
    summed = torch.empty((sums, columns), dtype=weight.dtype, device=x.device)
    launch(
        column_sum_kernel,
        (triton.cdiv(columns, 32), sums),
        partial,
        summed,
        programs,
        columns,
        LINES=32,
        COLS=32,
        num_warps=4,
    )
    return dx, summed[0], summed[1] if bias is not None else None


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor | None, ...]:
    return norm_backward(grad, x, weight, None, eps, centred=False)[:2]


@implements(ops.rms_norm, backend="triton", backward=rms_norm_backward)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return norm_forward(x, weight, None, eps, centred=False)


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    return norm_backward(grad, x, weight, bias, eps, centred=True)


@implements(ops.layer_norm, backend="triton", backward=layer_norm_backward)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return norm_forward(x, weight, bias, eps, centred=True)
