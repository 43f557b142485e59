"""GroupNorm kernels: a program owns one group of one image, a row of C/groups channels of `size` elements each.

      size →
    +---------------+   tiles of CHANNELS x SIZE cover the row; a row that fits in one stays in registers (WHOLE),
  c | tile 0 tile 1 |   any other is walked again, and what was read before comes from L2
  ↓ | tile 2 tile 3 |
    +---------------+   a channel is a line of a tile, so sums along lines are sums per channel

With x̂ = (x - mean) · rstd, each image's share of dweight is Σ_size grad · x̂ and of dbias Σ_size grad, per channel. The
averages that dx needs are those shares weighted, so they cost nothing more:

    dx = rstd · (grad · weight - x̂ · avg(g · x̂) - avg(g)),    Σ_row g · x̂ = Σ_channels weight · share of dweight

Shares are written as [images, channels] and summed down by a second kernel: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.memory.columns import sum_columns
from tilestack.kernels.tiles import accumulator, next_power, widened

LARGEST_TILE = 8192  # elements that a program holds of each tensor


@triton.jit
def load_tile(ptr, channel, position, channels, size, ACC: tl.constexpr):
    inside = (channel < channels)[:, None] & (position < size)[None, :]
    return tl.load(ptr + channel.to(tl.int64)[:, None] * size + position[None, :], mask=inside, other=0).to(ACC), inside


@triton.jit
def elements_of_group(channels, size):
    """In 64 bits: 512 channels of 2048² are more than 32 count to."""
    return tl.cast(channels, tl.int64) * size


@triton.jit
def per_channel(ptr, offset, channel, channels, PRESENT: tl.constexpr, ABSENT: tl.constexpr, ACC: tl.constexpr):
    """A weight or bias for each line of a tile; a constant where there is none."""
    if PRESENT:
        value = tl.load(ptr + offset + channel, mask=channel < channels, other=0).to(ACC)
    else:
        value = tl.full(channel.shape, ABSENT, ACC)
    return value[:, None]


@triton.jit
def group_statistics(
    x_ptr, channels, size, eps, ACC: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Mean and 1 / std of a row, merging each tile's mean and squared deviations into the whole's."""
    mean = tl.zeros([], ACC)
    squares = tl.zeros([], ACC)
    seen = tl.zeros([], ACC)
    for first in range(0, channels, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        for start in range(0, size, SIZE):
            x, inside = load_tile(x_ptr, channel, start + tl.arange(0, SIZE), channels, size, ACC)
            count = (tl.minimum(channels - first, CHANNELS) * tl.minimum(size - start, SIZE)).to(ACC)
            tile_mean = tl.sum(x) / count
            x = tl.where(inside, x - tile_mean, 0.0)
            share = count / (seen + count)
            step = tile_mean - mean
            squares += tl.sum(x * x) + step * step * seen * share
            mean += step * share
            seen += count
    return mean, tl.rsqrt(squares / seen + eps)


@triton.jit
def group_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,  # [images, groups, channels of a group, size], [groups, channels], the same, x
    groups, channels, size, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * channels * size
    out_ptr += row * channels * size
    offset = (row % groups) * channels
    if WHOLE:
        channel = tl.arange(0, CHANNELS)
        position = tl.arange(0, SIZE)
        x, inside = load_tile(x_ptr, channel, position, channels, size, ACC)
        count = elements_of_group(channels, size).to(ACC)
        x = tl.where(inside, x - tl.sum(x) / count, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x) / count + eps)
        y = y * per_channel(weight_ptr, offset, channel, channels, HAS_WEIGHT, 1.0, ACC)
        y = y + per_channel(bias_ptr, offset, channel, channels, HAS_BIAS, 0.0, ACC)
        tl.store(out_ptr + channel[:, None] * size + position[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        mean, rstd = group_statistics(x_ptr, channels, size, eps, ACC, CHANNELS, SIZE)
        for first in range(0, channels, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            weight = per_channel(weight_ptr, offset, channel, channels, HAS_WEIGHT, 1.0, ACC)
            bias = per_channel(bias_ptr, offset, channel, channels, HAS_BIAS, 0.0, ACC)
            for start in range(0, size, SIZE):
                position = start + tl.arange(0, SIZE)
                x, inside = load_tile(x_ptr, channel, position, channels, size, ACC)
                y = ((x - mean) * rstd * weight + bias).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + channel.to(tl.int64)[:, None] * size + position[None, :], y, mask=inside)


@triton.jit
def group_norm_bwd_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, share_ptr,  # share: [2, images, groups, channels of a group]
    groups, channels, size, eps,
    HAS_WEIGHT: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * channels * size
    x_ptr += row * channels * size
    dx_ptr += row * channels * size
    dweight_ptr = share_ptr + row * channels
    dbias_ptr = share_ptr + (tl.num_programs(0) + row) * channels
    offset = (row % groups) * channels
    count = elements_of_group(channels, size).to(ACC)
    if WHOLE:
        channel = tl.arange(0, CHANNELS)
        position = tl.arange(0, SIZE)
        x, inside = load_tile(x_ptr, channel, position, channels, size, ACC)
        grad, inside = load_tile(grad_ptr, channel, position, channels, size, ACC)
        x = tl.where(inside, x - tl.sum(x) / count, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x) / count + eps)
        x = x * rstd
        dweight = tl.sum(grad * x, 1)
        dbias = tl.sum(grad, 1)
        weight = per_channel(weight_ptr, offset, channel, channels, HAS_WEIGHT, 1.0, ACC)
        gx = tl.sum(weight * dweight[:, None]) / count
        g = tl.sum(weight * dbias[:, None]) / count
        dx = (grad * weight - x * gx - g) * rstd
        tl.store(dx_ptr + channel[:, None] * size + position[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            tl.store(dweight_ptr + channel, dweight, mask=channel < channels)
            tl.store(dbias_ptr + channel, dbias, mask=channel < channels)
    else:
        mean, rstd = group_statistics(x_ptr, channels, size, eps, ACC, CHANNELS, SIZE)
        gx = tl.zeros([], ACC)
        g = tl.zeros([], ACC)
        for first in range(0, channels, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            products = tl.zeros([CHANNELS, SIZE], ACC)
            grads = tl.zeros([CHANNELS, SIZE], ACC)
            for start in range(0, size, SIZE):
                position = start + tl.arange(0, SIZE)
                x, inside = load_tile(x_ptr, channel, position, channels, size, ACC)
                grad, inside = load_tile(grad_ptr, channel, position, channels, size, ACC)
                products += grad * ((x - mean) * rstd)
                grads += grad
            dweight = tl.sum(products, 1)
            dbias = tl.sum(grads, 1)
            weight = per_channel(weight_ptr, offset, channel, channels, HAS_WEIGHT, 1.0, ACC)
            gx += tl.sum(weight * dweight[:, None]) / count
            g += tl.sum(weight * dbias[:, None]) / count
            if HAS_WEIGHT:
                tl.store(dweight_ptr + channel, dweight, mask=channel < channels)
                tl.store(dbias_ptr + channel, dbias, mask=channel < channels)
        for first in range(0, channels, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            weight = per_channel(weight_ptr, offset, channel, channels, HAS_WEIGHT, 1.0, ACC)
            for start in range(0, size, SIZE):
                position = start + tl.arange(0, SIZE)
                x, inside = load_tile(x_ptr, channel, position, channels, size, ACC)
                grad, inside = load_tile(grad_ptr, channel, position, channels, size, ACC)
                dx = ((grad * weight - (x - mean) * rstd * gx - g) * rstd).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + channel.to(tl.int64)[:, None] * size + position[None, :], dx, mask=inside)


def tiling(x: Tensor, groups: int) -> tuple[tuple[int, int], tuple[int, int, int], dict]:
    """(images, channels), (groups, channels of a group, size), and the constants of a launch."""
    images, all_channels = x.shape[:2]
    channels, size = all_channels // groups, x.numel() // max(images * all_channels, 1)
    width = min(next_power(size), LARGEST_TILE)
    height = min(next_power(channels), LARGEST_TILE // width)
    constants = dict(
        WHOLE=channels <= height and size <= width, ACC=accumulator(x.dtype), CHANNELS=height, SIZE=width,
        num_warps=min(max(height * width // 1024, 1), 8),
    )  # fmt: skip
    return (images, all_channels), (groups, channels, size), constants


def group_norm_backward(
    grad: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    like = lambda t: None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return like(x), like(weight), like(bias)
    (images, channels), sizes, constants = tiling(x, groups)
    has_weight = weight is not None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    shares = torch.empty((2 * has_weight, images, channels), dtype=widened(x.dtype), device=x.device)
    weight = None if weight is None else weight.contiguous()
    launch(
        group_norm_bwd_kernel, (images * groups,), grad.contiguous(), x.contiguous(), weight, dx, shares, *sizes, float(eps),
        HAS_WEIGHT=has_weight, **constants,
    )  # fmt: skip
    if weight is None:
        return dx, None, None
    dweight, dbias = sum_columns(shares, weight.dtype)
    return dx, dweight, None if bias is None else dbias


@implements(ops.group_norm, backend="triton", repeat=straight_line, backward=group_norm_backward)
def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    (images, _), sizes, constants = tiling(x, groups)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    launch(
        group_norm_fwd_kernel, (images * groups,), x.contiguous(), weight, bias, out, *sizes, float(eps),
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **constants,
    )  # fmt: skip
    return out
