"""Convolution as a matrix product whose left operand is not in memory: the implicit GEMM.

Each place of a filter on an image is a row, each filter a column, and the sum runs over taps and channels:

    rows: images · H' · W'                K = taps · channels            a step along K is some channels of one tap: the
    +-----------------------+            +---------+                     rows of its tile are where that tap of the filter
    | tap 0 | tap 1 | …     |  x         | filters |                     lies for every place, so that a tile is gathered
    +-----------------------+            +---------+                     with one address a row and no copy is made
      channels  channels

Taps and channels are one loop, so that the loads of the next steps are under way over the end of a tap too. From one step
to the next all rows move by the same distance, a number the whole program shares; a row keeps the address of its first tap
and asks in each step only whether its tap hangs over the edge, where it counts as zeros: that is padding. With channels
last in memory (NHWC) a row of a tile is contiguous; other orders are read by their strides.

Images of few channels would fill a small part of a step. With channels last, the taps along a line of the filter lie side by
side in memory, the channels of one after those of the other, and are taken for the channels of a single tap: of 7 × 7 taps
and 3 channels, 7 steps with 21 numbers in each.

The gradient of x is the same product with the roles of the images exchanged: a row is a pixel of x, and tap r of the filter
lay over it where the arriving gradient's place is (pixel + padding - r · dilation) / stride, if that is whole. Whether it
is depends on the pixel's remainder by the stride, so pixels of one remainder make up a tile, which walks over their taps
alone:

    stride 2, 3 taps, padding 1      pixel    0  1  2  3  4  5       even pixels meet tap 1,
                                     taps     1 02  1 02  1 02       odd ones taps 0 and 2
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.conv.configs import LEAST, Config, product_launch, steps_of
from tilestack.kernels.tiles import accumulator, cdiv
from tilestack.ops.conv import channels_lie_together


class Geometry(NamedTuple):
    """How filters move over images: along height and width."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> "Geometry":
        pair = lambda values: (int(values[0]), int(values[1]))
        return cls(pair(stride), pair(padding), pair(dilation), groups)

    @property
    def numbers(self) -> tuple[int, ...]:
        return *self.stride, *self.padding, *self.dilation


@triton.jit
def first_tap_over(phase, taps, stride, padding, dilation):
    """Of pixels that are `phase` past a multiple of the stride: the first tap that lies over them from any place, `taps`
    where there is none."""
    tap = 0
    while (tap < taps) & ((phase + padding - tap * dilation) % stride != 0):
        tap += 1
    return tap


@triton.jit
def conv2d_kernel(
    x_ptr, weight_ptr, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr,  # [N, C, H, W], [K, C, R, S], [K], [], [K], [N, K, H', W']
    tiles, images, out_height, out_width, height, width, channels, pixel_channels, filters, R, S,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, every_h, every_w,
    x_stride_n, x_stride_c, x_stride_h, x_stride_w,
    weight_stride_g, weight_stride_k, weight_stride_c, weight_stride_r, weight_stride_s,
    out_stride_n, out_stride_k, out_stride_h, out_stride_w,
    BACKWARDS: tl.constexpr, MERGED: tl.constexpr, FLAT: tl.constexpr, EVEN_C: tl.constexpr, ACC: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The product for the channels and filters of one group.

    BACKWARDS, out is x's gradient and x what arrives, and a program has pixels that are some remainder, its phase, past
    multiples of the stride. MERGED, channels are those of a line of taps. FLAT, the places of out lie one after the other,
    so that nothing but their numbers has to be kept until the end.
    """
    # Neighbours have the same places and other filters: images are large and read once, filters stay in the cache.
    tile, group = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    filter_tiles = tl.cdiv(filters, BLOCK_N)
    k = tile % filter_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    if BACKWARDS:
        phase_w, phase_h = group % stride_w, group // stride_w % stride_h
        group = group // stride_w // stride_h
        lines, columns = tl.cdiv(out_height, stride_h), tl.cdiv(out_width, stride_w)
    else:
        lines, columns = out_height, out_width
    # Numbers of places may need 64 bits, those within one image and a tile do not.
    start = (tile // filter_tiles).to(tl.int64) * BLOCK_M
    place = (start % (lines * columns)).to(tl.int32) + tl.arange(0, BLOCK_M)
    image = start // (lines * columns) + place // (lines * columns)
    line, column = place // columns % lines, place % columns
    if BACKWARDS:
        first_r = first_tap_over(phase_h, R, stride_h, padding_h, dilation_h)
        first_s = first_tap_over(phase_w, S, stride_w, padding_w, dilation_w)
        taps_r, taps_s = tl.cdiv(R - first_r, every_h), tl.cdiv(S - first_s, every_w)
        top = line + (phase_h + padding_h - first_r * dilation_h) // stride_h
        left = column + (phase_w + padding_w - first_s * dilation_w) // stride_w
        hop_h, hop_w = -dilation_h * every_h // stride_h, -dilation_w * every_w // stride_w
        out_h, out_w = line * stride_h + phase_h, column * stride_w + phase_w
        met = taps_r * taps_s > 0
        weight_ptr += tl.where(met, first_r * tl.cast(weight_stride_r, tl.int64) + first_s * weight_stride_s, 0)
    else:
        taps_r, taps_s = R, S
        top, left = line * stride_h - padding_h, column * stride_w - padding_w
        hop_h, hop_w = dilation_h, dilation_w
        out_h, out_w = line, column
        met = True
    if FLAT:
        number = start + tl.arange(0, BLOCK_M)
        there = number < tl.cast(images, tl.int64) * lines * columns
        out_row = number * out_stride_w
    else:
        there = (image < images) & (out_h < out_height) & (out_w < out_width)
        out_row = image * out_stride_n + out_h.to(tl.int64) * out_stride_h + out_w.to(tl.int64) * out_stride_w

    group = group.to(tl.int64)
    x_ptr += group * channels * x_stride_c
    weight_ptr += group * weight_stride_g
    x_at = x_ptr + image * x_stride_n + top.to(tl.int64) * x_stride_h + left.to(tl.int64) * x_stride_w
    x_at = x_at[:, None] + c.to(tl.int64)[None, :] * x_stride_c
    weight_at = weight_ptr + c.to(tl.int64)[:, None] * weight_stride_c + k.to(tl.int64)[None, :] * weight_stride_k
    has_x, has_filter = there & met, (k < filters) & met
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    # Where products are as precise as their sum, that of each tap is made by itself: thousands in a row lose more digits.
    BY_TAPS: tl.constexpr = x_ptr.dtype.element_ty == ACC
    if BY_TAPS:
        of_tap = total
    # Pixels that no tap lies over make one step in which nothing is there.
    steps = tl.maximum(taps_r * taps_s * tl.cdiv(channels, BLOCK_C), 1)
    tl.assume(steps > 0)
    r = 0
    s = 0
    first = 0
    for _ in range(steps):
        h, w = top + r * hop_h, left + s * hop_w
        row_inside = has_x & (h >= 0) & (h < height)
        if MERGED:
            pixel = w[:, None] + ((first + c) // pixel_channels)[None, :]
            inside = row_inside[:, None] & (pixel >= 0) & (pixel < width)
        else:
            inside = (row_inside & (w >= 0) & (w < width))[:, None]
        has_weight = has_filter[None, :]
        if not EVEN_C:
            inside = inside & (c < channels - first)[None, :]
            has_weight = has_weight & (c < channels - first)[:, None]
        x_moved = tl.cast(r * hop_h, tl.int64) * x_stride_h + tl.cast(s * hop_w, tl.int64) * x_stride_w
        a = tl.load(x_at + (x_moved + tl.cast(first, tl.int64) * x_stride_c), mask=inside, other=0)
        weight_moved = (
            tl.cast(r * every_h, tl.int64) * weight_stride_r + tl.cast(s * every_w, tl.int64) * weight_stride_s
        )
        b = tl.load(weight_at + (weight_moved + tl.cast(first, tl.int64) * weight_stride_c), mask=has_weight, other=0)
        first += BLOCK_C
        next_tap = first >= channels
        if BY_TAPS:
            of_tap = tl.dot(a, b, of_tap, input_precision="ieee", out_dtype=ACC)
            total += tl.where(next_tap, of_tap, 0.0)
            of_tap = tl.where(next_tap, 0.0, of_tap)
        else:
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        first = tl.where(next_tap, 0, first)
        s += next_tap.to(tl.int32)
        next_line = s == taps_s
        s = tl.where(next_line, 0, s)
        r += next_line.to(tl.int32)

    filter_at = group * filters + k
    if SCALED:
        KIND: tl.constexpr = tl.float64 if weight_scale_ptr.dtype.element_ty == tl.float64 else tl.float32
        scale = tl.load(weight_scale_ptr + filter_at, mask=k < filters, other=0).to(KIND)
        result = total.to(KIND) * (tl.load(x_scale_ptr).to(KIND) * scale)[None, :]
    else:
        result = total
    if bias_ptr is not None:
        result += tl.load(bias_ptr + filter_at, mask=k < filters, other=0).to(result.dtype)[None, :]
    out_at = out_ptr + out_row[:, None] + filter_at[None, :] * out_stride_k
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=there[:, None] & (k < filters)[None, :])


def image_like(x: Tensor, channels: int, sides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An image of other sizes in the memory order of x: channels last where they are, else contiguous."""
    order = torch.channels_last if channels_lie_together(x) else torch.contiguous_format
    return torch.empty((x.shape[0], channels, *sides), dtype=dtype, device=x.device, memory_format=order)


def line_is_one_tap(x: Tensor, S: int, geometry: Geometry) -> bool:
    """Whether S taps along a line of the filter are few channels each and lie side by side in the image. Of one channel, or in
    an image one pixel wide, there is nothing to step to, whatever the strides say."""
    side_by_side = (x.stride(3), x.stride(1), geometry.dilation[1], geometry.groups) == (x.shape[1], 1, 1, 1)
    return S > 1 and 1 < x.shape[1] < LEAST and x.shape[3] > 1 and side_by_side


def gathered_product(
    x: Tensor, weight: Tensor, out: Tensor, geometry: Geometry, backwards: bool, config: Config,
    bias: Tensor | None = None, scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Into `out` the convolution of x or, backwards, the gradient of the image whose filters gave what arrives as x."""
    groups, stride = geometry.groups, geometry.stride if backwards else (1, 1)
    filters, channels = out.shape[1] // groups, x.shape[1] // groups
    R, S = weight.shape[2:]
    strides = steps_of(weight)
    ours = (strides[1], strides[0]) if backwards else strides[:2]  # of out's channels, and of x's
    lies_alike = (strides[3], strides[1]) == (channels, 1)
    merged = not backwards and lies_alike and line_is_one_tap(x, S, geometry)
    summed, S = (S * channels, 1) if merged else (channels, S)
    tile = product_launch(config, x, summed, filters, merged)
    # Every how many-th tap lies over the pixels of a phase.
    every = [step // math.gcd(step, apart) for step, apart in zip(stride, geometry.dilation, strict=True)]
    places = out.shape[0] * math.prod(cdiv(side, step) for side, step in zip(out.shape[2:], stride, strict=True))
    flat = stride == (1, 1) and (out.stride(0), out.stride(2)) == (
        out.shape[2] * out.stride(2), out.shape[3] * out.stride(3),
    )  # fmt: skip
    tiles = cdiv(places, tile["BLOCK_M"]) * cdiv(filters, tile["BLOCK_N"])
    launch(
        conv2d_kernel, (tiles * groups * math.prod(stride),), x, weight, bias, *scales, out, tiles, out.shape[0],
        *out.shape[2:], *x.shape[2:], summed, channels, filters, R, S, *geometry.numbers, *every, *steps_of(x),
        weight.shape[0] // groups * strides[0], *ours, *strides[2:], *out.stride(),
        BACKWARDS=backwards, MERGED=merged, FLAT=flat, EVEN_C=summed % tile["BLOCK_C"] == 0,
        ACC=tl.int32 if x.dtype == torch.int8 else accumulator(x.dtype), SCALED=scales[1] is not None, **tile,
    )  # fmt: skip
    return out
