"""Lines of taps written out, and added up again: what a line of a filter sees of an image, place by place.

With few channels and several taps, the channels of one tap are too few for a step of a product. Those of all taps along a
line of the filter are enough, and half an im2col makes them a dimension of their own:

    image [N, C, H, W]                            lines [N, D, H, W'], channels last
    a line of pixels  0 1 2 3 4 5 …               place 0   | pixel 0 | pixel 1 | pixel 2 | 0 … |
                                                  place 1   | pixel 2 | pixel 3 | pixel 4 | 0 … |     stride 2, 3 taps
                                                              C numbers                  up to D

A convolution of R × S taps over C channels is then one of R × 1 taps over D, with the same stride, padding and dilation along
the height and none of them along the width. D is S · C filled up with zeros, so that tensor cores are filled, every place
begins where a vector may, and no step asks whether a tap hangs over the side of an image. Written out like this, the image
takes D · W' / (C · W) of its memory; along both sides, im2col would take about R times that.

A filter is an image of one place: `lines_of_taps` lays it out, too. The gradient of an image is that of its lines, each of
whose numbers goes back to its pixel: `pixels_of_lines` adds up, for a pixel, what all taps over it have, in order of the taps.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.conv.configs import LEAST, STEP_BYTES
from tilestack.kernels.tiles import accumulator, cdiv, next_power

MOST_PLACES = 64  # of a tile of lines
TILE = 1024  # numbers of a tile of an image
STEP = STEP_BYTES // 2  # of half precisions, in a step of a product


@triton.jit
def line_of(height, tiles):
    """This program's image, line of it, and tile of that line: numbers, which cost a tile's elements nothing."""
    line = tl.program_id(0) // tiles
    return (line // height).to(tl.int64), (line % height).to(tl.int64), tl.program_id(0) % tiles


@triton.jit
def lines_of_taps_kernel(
    image_ptr, out_ptr,  # [N, C, H, W], [N, H, W', D]
    height, width, places, depth, padding,
    stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    image, line, tile = line_of(height, tl.cdiv(places, PLACES))
    place = tile * PLACES + tl.arange(0, PLACES)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tap, channel = d // CHANNELS, d % CHANNELS
    pixel = place * STRIDE
    further = tl.where(tap < TAPS, tap * DILATION - padding, width)
    inside = (pixel[:, None] + further[None, :]).to(tl.uint32) < tl.cast(width, tl.uint32)  # and not below zero
    # What a place adds to an address and what a tap does are computed apart, once for each of them.
    of_place = pixel.to(tl.int64) * stride_w
    of_tap = further.to(tl.int64) * stride_w + channel.to(tl.int64) * stride_c
    image_ptr += image * stride_n + line * stride_h
    value = tl.load(image_ptr + (of_place[:, None] + of_tap[None, :]), mask=inside, other=0)
    out_ptr += (image * height + line) * places * depth
    tl.store(out_ptr + place.to(tl.int64)[:, None] * depth + d[None, :], value, mask=(place < places)[:, None])


@triton.jit
def pixels_of_lines_kernel(
    lines_ptr, out_ptr,  # [N, H, W', D], [N, C, H, W]
    height, width, sites, places, padding,
    stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, EVERY: tl.constexpr,
    DEPTH: tl.constexpr, SITES: tl.constexpr, BLOCK_E: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A site is as many pixels of a line as the stride is long, and e counts their channels."""
    image, line, tile = line_of(height, tl.cdiv(sites, SITES))
    site = tile * SITES + tl.arange(0, SITES)
    e = tl.arange(0, BLOCK_E)
    phase, channel = e // CHANNELS, e % CHANNELS
    # The first tap that lies over a pixel of this phase from any place. It is one of the first few, or there is none.
    tap = tl.full([BLOCK_E], TAPS, tl.int32)
    for i in tl.static_range(EVERY):
        tap = tl.where((phase + padding - (EVERY - 1 - i) * DILATION) % STRIDE == 0, EVERY - 1 - i, tap)
    place = site[:, None] + ((phase + padding - tap * DILATION) // STRIDE)[None, :]
    column = (site * STRIDE)[:, None] + phase[None, :]
    there = (phase < STRIDE)[None, :] & (column < width)
    lines_ptr += (image * height + line) * places * DEPTH
    at = place.to(tl.int64) * DEPTH + (tap * CHANNELS + channel)[None, :]
    # From one tap over a pixel to the next, all move by the same distance.
    HOP: tl.constexpr = EVERY * DILATION // STRIDE
    total = tl.zeros([SITES, BLOCK_E], ACC)
    # Unrolled, so that all loads are under way at once. A call, as of cdiv, is no constant to Triton 3.6.
    for i in tl.static_range((TAPS + EVERY - 1) // EVERY):
        meets = (
            there & (tap + i * EVERY < TAPS)[None, :] & ((place - i * HOP).to(tl.uint32) < tl.cast(places, tl.uint32))
        )
        total += tl.load(lines_ptr + (at + i * (EVERY * CHANNELS - HOP * DEPTH)), mask=meets, other=0)
    out_ptr += image * stride_n + line * stride_h
    at = column.to(tl.int64) * stride_w + channel.to(tl.int64)[None, :] * stride_c
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


def depth_of(channels: int, taps: int) -> int:
    """How many numbers a place of written-out lines has: whole steps of a product."""
    numbers = channels * taps
    return LEAST if numbers <= LEAST else cdiv(numbers, STEP) * STEP


def empty_lines(image: Tensor, taps: int, places: int, dtype: torch.dtype) -> Tensor:
    """Memory for the lines of an image, [N, D, H, W'] with channels last."""
    images, channels, height, _ = image.shape
    made = torch.empty((images, height, places, depth_of(channels, taps)), dtype=dtype, device=image.device)
    return made.permute(0, 3, 1, 2)


def lines_of_taps(
    image: Tensor, taps: int, places: int, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """The lines of an image in any memory order, for a filter with so many taps and places along a line."""
    out = empty_lines(image, taps, places, image.dtype)
    images, depth, height, _ = out.shape
    tile = min(MOST_PLACES, next_power(places))
    launch(
        lines_of_taps_kernel, (images * height * cdiv(places, tile), depth // LEAST), image, out, height, image.shape[3],
        places, depth, padding, *image.stride(), CHANNELS=image.shape[1], TAPS=taps, STRIDE=stride, DILATION=dilation,
        PLACES=tile, BLOCK_D=LEAST,
    )  # fmt: skip
    return out


def pixels_of_lines(lines: Tensor, out: Tensor, taps: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Into an image what its lines add up to: the transpose of `lines_of_taps`."""
    images, channels, height, width = out.shape
    _, depth, _, places = lines.shape
    sites, numbers = cdiv(width, stride), next_power(stride * channels)
    tile = min(max(1, TILE // numbers), next_power(sites))
    launch(
        pixels_of_lines_kernel, (images * height * cdiv(sites, tile),), lines, out, height, width, sites, places, padding,
        *out.stride(), CHANNELS=channels, TAPS=taps, STRIDE=stride, DILATION=dilation,
        EVERY=stride // math.gcd(stride, dilation), DEPTH=depth, SITES=tile, BLOCK_E=numbers, ACC=accumulator(lines.dtype),
    )  # fmt: skip
    return out
