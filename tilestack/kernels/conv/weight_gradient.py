"""The gradient of a convolution's weight: for each tap, filters by channels, summed over all places of all images.

    places →                                 channels
    +---------------+         +---+          +-----+       one program per tile of filters × channels of a tap walks over
    | grad, turned  |  filters| x |  places  |     |       some of the places: the arriving gradient of a place times what
    +---------------+         +---+          +-----+       lay under the tap there
                            under the tap

Few tiles would leave the GPU idle, so several programs share the places, each with a partial sum of its own, and the partial
sums are added up in a fixed order.

A step is BLOCK_P places on. Dividing place numbers into image, line and column in each step would take longer than the
product, so a place keeps its line and column and moves them on, as the hands of a clock:

    column += Δw, and where it passes the end of a line: line += 1;   line += Δh, and where it passes the last: the next image

Taps along a line of the filter that lie side by side in memory, of few channels, are taken for one (`implicit_gemm.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.conv.configs import Config, steps_of, weight_launch
from tilestack.kernels.conv.implicit_gemm import Geometry, line_is_one_tap
from tilestack.kernels.memory.columns import sum_columns
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, widened

WAVES = 4  # programs per multiprocessor that the places are shared among
PLACES_EACH = 1024  # places that are worth a partial sum


@triton.jit
def conv2d_bwd_weight_kernel(
    grad_ptr, x_ptr, partial_ptr,  # [places, groups · K], [N, C, H, W], [parts, groups · K, taps, C]
    places, out_height, out_width, height, width, channels, pixel_channels, filters, groups, S, taps, part,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    grad_stride_p, grad_stride_k, x_stride_n, x_stride_c, x_stride_h, x_stride_w,
    MERGED: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    channel_tiles = tl.cdiv(channels, BLOCK_C)
    k = tl.program_id(1) // channel_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    c = tl.program_id(1) % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    tap, group = tl.program_id(0) % taps, (tl.program_id(0) // taps).to(tl.int64)
    filter_at, channel_at = group * filters + k, group * channels + c
    start = tl.program_id(2).to(tl.int64) * part
    left = tl.minimum(part, places - start)
    p = tl.arange(0, BLOCK_P)

    # Of each place its line and column, times the strides: where the filter's first tap lies, but for the padding.
    of_image = out_height * out_width
    place = (start % of_image).to(tl.int32) + p
    image = start // of_image + place // of_image
    line = place // out_width % out_height * stride_h
    column = place % out_width * stride_w
    tap_h, tap_w = tap // S * dilation_h - padding_h, tap % S * dilation_w - padding_w
    move_h, move_w = BLOCK_P // out_width % out_height * stride_h, BLOCK_P % out_width * stride_w
    end_h, end_w = out_height * stride_h, out_width * stride_w
    x_at = image * x_stride_n + (line + tap_h).to(tl.int64) * x_stride_h + (column + tap_w).to(tl.int64) * x_stride_w
    step_h, step_w = tl.cast(x_stride_h, tl.int64), tl.cast(x_stride_w, tl.int64)
    moved = BLOCK_P // of_image * tl.cast(x_stride_n, tl.int64) + move_h * step_h + move_w * step_w
    over_w, over_h = stride_h * step_h - end_w * step_w, x_stride_n - end_h * step_h

    x_ptr += channel_at[None, :] * x_stride_c
    grad_at = grad_ptr + filter_at[:, None] * grad_stride_k + (start + p)[None, :] * grad_stride_p
    total = tl.zeros([BLOCK_K, BLOCK_C], ACC)
    # Where products are as precise as their sum, that of each step is made by itself: hundreds in a row lose more digits.
    BY_STEPS: tl.constexpr = x_ptr.dtype.element_ty == ACC
    steps = tl.maximum(tl.cdiv(left, BLOCK_P), 1)  # without any images one, in which nothing counts
    tl.assume(steps > 0)  # else Triton 3.6 has the products of a large tile wait for each other
    for _ in range(steps):
        h, w = line + tap_h, column + tap_w
        counts = p < tl.minimum(left, BLOCK_P).to(tl.int32)
        grad = tl.load(grad_at, mask=(k < filters)[:, None] & counts[None, :], other=0)
        inside = counts & (h >= 0) & (h < height)
        if MERGED:
            pixel = w[:, None] + (c // pixel_channels)[None, :]
            under = inside[:, None] & (pixel >= 0) & (pixel < width)
        else:
            under = (inside & (w >= 0) & (w < width))[:, None]
        x = tl.load(x_ptr + x_at[:, None], mask=under & (c < channels)[None, :], other=0)
        if BY_STEPS:  # always so many are left, but the compiler, which cannot know, would make one sum of both again
            total += tl.where(left > 0, tl.dot(grad, x, input_precision="ieee", out_dtype=ACC), 0.0)
        else:
            total = tl.dot(grad, x, total, input_precision="ieee", out_dtype=ACC)
        column += move_w
        next_line = column >= end_w
        column = tl.where(next_line, column - end_w, column)
        line += tl.where(next_line, move_h + stride_h, move_h)
        next_image = line >= end_h
        line = tl.where(next_image, line - end_h, line)
        x_at += moved + tl.where(next_line, over_w, 0) + tl.where(next_image, over_h, 0)
        grad_at += BLOCK_P * tl.cast(grad_stride_p, tl.int64)
        left -= BLOCK_P
    partial_ptr += tl.program_id(2).to(tl.int64) * groups * filters * taps * channels
    at = partial_ptr + (filter_at[:, None] * taps + tap) * channels + c[None, :]
    tl.store(at, total.to(partial_ptr.dtype.element_ty), mask=(k < filters)[:, None] & (c < channels)[None, :])


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, config: Config) -> Tensor:
    """The gradient of the weight, in the dtype of what arrives and with its channels together."""
    groups = geometry.groups
    filters, channels, R, S = grad.shape[1] // groups, x.shape[1] // groups, *weight.shape[2:]
    out_sides, rows = grad.shape[2:], grad.permute(0, 2, 3, 1).flatten(0, 2)
    places = rows.shape[0]
    merged = line_is_one_tap(x, S, geometry)
    summed, taps, line = (S * channels, R, 1) if merged else (channels, R * S, S)
    tile = weight_launch(config, rows, x, filters, summed)
    step = tile["BLOCK_P"]
    # Taps of many groups are more than the 65,535 that all dimensions of a grid but the first take.
    tiles = taps * groups, cdiv(filters, tile["BLOCK_K"]) * cdiv(summed, tile["BLOCK_C"])
    wanted = min(cdiv(WAVES * multiprocessors(x.device), tiles[0] * tiles[1]), places // PLACES_EACH)
    part = cdiv(max(1, cdiv(places, max(1, wanted))), step) * step
    parts = max(1, cdiv(places, part))
    dtype = grad.dtype if parts == 1 else widened(grad.dtype)
    partial = torch.empty((parts, groups * filters, R, S, channels), dtype=dtype, device=grad.device)
    launch(
        conv2d_bwd_weight_kernel, (*tiles, parts), rows, x, partial, places, *out_sides, *x.shape[2:], summed, channels,
        filters, groups, line, taps, part, *geometry.numbers, *rows.stride(), *steps_of(x),
        MERGED=merged, ACC=accumulator(grad.dtype), **tile,
    )  # fmt: skip
    total = partial[0] if parts == 1 else sum_columns(partial.view(1, parts, -1), grad.dtype).view(partial.shape[1:])
    return total.permute(0, 3, 1, 2)
