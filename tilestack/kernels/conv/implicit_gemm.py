"""Convolution as a matrix product whose left operand is not in memory: the implicit GEMM.

Each place of a filter on an image is a row, each filter a column, and the sum runs over taps and channels:

    rows: images · H' · W'                K = taps · channels            a step along K is some channels of one tap: the
    +-----------------------+            +---------+                     rows of its tile are where that tap of the filter
    | tap 0 | tap 1 | …     |  x         | filters |                     lies for every place, so that a tile is gathered
    +-----------------------+            +---------+                     with one address a row and no copy is made
      channels  channels

Taps that hang over the edge are masked, which is what padding with zeros means. With channels last in memory (NHWC) a
row of a tile is contiguous; other orders are read by their strides.

The gradient of x is the same product with the roles of the images exchanged: a row is a pixel of x, and tap (r, s) of the
filter lay over it where the arriving gradient's place is (pixel + padding - r · dilation) / stride, if that is whole. The
gradient of the weight sums over places instead: one program per tile of filters × channels of a tap walks some of the
places, and where there are few tiles several programs share the places, each with a partial sum of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.memory.columns import sum_columns
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, widened

WAVES = 4  # programs per multiprocessor that the weight's gradient is shared among
PLACES_EACH = 4096  # places that are worth a partial sum of the weight's gradient


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
def tap_over(place, tap, stride, padding, dilation, size, BACKWARDS: tl.constexpr):
    """(where a tap of the filter at a place lies in an image, whether it does). BACKWARDS, the place is in the image, and
    asked is which filter has this tap over it."""
    if BACKWARDS:
        moved = place + padding - tap * dilation
        where = moved // stride
        inside = (moved >= 0) & (moved % stride == 0) & (where < size)
    else:
        where = place * stride - padding + tap * dilation
        inside = (where >= 0) & (where < size)
    return where, inside


@triton.jit
def conv2d_kernel(
    x_ptr, weight_ptr, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr,  # [N, C, H, W], [K, C, R, S], [K], [], [K], [N, K, H', W']
    places, out_height, out_width, height, width, channels, filters, S, taps,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    x_stride_n, x_stride_c, x_stride_h, x_stride_w,
    weight_stride_g, weight_stride_k, weight_stride_c, weight_stride_r, weight_stride_s,
    out_stride_n, out_stride_k, out_stride_h, out_stride_w,
    BACKWARDS: tl.constexpr, ACC: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The product for the channels and filters of one group; out is x's gradient, and x what arrives, where BACKWARDS."""
    group = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    image = place // (out_height * out_width)
    out_h = (place // out_width % out_height).to(tl.int32)
    out_w = (place % out_width).to(tl.int32)
    x_ptr += group * channels * x_stride_c
    weight_ptr += group * weight_stride_g
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    steps = tl.cdiv(channels, BLOCK_C)
    for step in range(taps * steps):
        tap, first = step // steps, step % steps * BLOCK_C
        r, s = tap // S, tap % S
        h, h_inside = tap_over(out_h, r, stride_h, padding_h, dilation_h, height, BACKWARDS)
        w, w_inside = tap_over(out_w, s, stride_w, padding_w, dilation_w, width, BACKWARDS)
        inside = h_inside & w_inside & (place < places)
        row = image * x_stride_n + h.to(tl.int64) * x_stride_h + w.to(tl.int64) * x_stride_w
        channel = first + c
        a = tl.load(
            x_ptr + row[:, None] + channel.to(tl.int64)[None, :] * x_stride_c,
            mask=inside[:, None] & (channel < channels)[None, :], other=0,
        )  # fmt: skip
        b = tl.load(
            weight_ptr + tl.cast(r, tl.int64) * weight_stride_r + tl.cast(s, tl.int64) * weight_stride_s
            + channel.to(tl.int64)[:, None] * weight_stride_c + k.to(tl.int64)[None, :] * weight_stride_k,
            mask=(channel < channels)[:, None] & (k < filters)[None, :], other=0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
    filter_at = group * filters + k
    if SCALED:
        KIND: tl.constexpr = tl.float64 if weight_scale_ptr.dtype.element_ty == tl.float64 else tl.float32
        scale = tl.load(weight_scale_ptr + filter_at, mask=k < filters, other=0).to(KIND)
        result = total.to(KIND) * (tl.load(x_scale_ptr).to(KIND) * scale)[None, :]
    else:
        result = total
    if bias_ptr is not None:
        result += tl.load(bias_ptr + filter_at, mask=k < filters, other=0).to(result.dtype)[None, :]
    out_row = image * out_stride_n + out_h.to(tl.int64) * out_stride_h + out_w.to(tl.int64) * out_stride_w
    out_at = out_ptr + out_row[:, None] + filter_at[None, :] * out_stride_k
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=(place < places)[:, None] & (k < filters)[None, :])


@triton.jit
def conv2d_bwd_weight_kernel(
    grad_ptr, x_ptr, partial_ptr,  # [N, K, H', W'], [N, C, H, W], [parts, groups · K, taps, C]
    places, out_height, out_width, height, width, channels, filters, groups, S, taps, part,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    grad_stride_n, grad_stride_k, grad_stride_h, grad_stride_w, x_stride_n, x_stride_c, x_stride_h, x_stride_w,
    ACC: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    channel_tiles = tl.cdiv(channels, BLOCK_C)
    k = tl.program_id(1) // channel_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    c = tl.program_id(1) % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    tap, group = tl.program_id(0) % taps, (tl.program_id(0) // taps).to(tl.int64)
    filter_at, channel_at = group * filters + k, group * channels + c
    start = tl.program_id(2).to(tl.int64) * part
    end = tl.minimum(start + part, places)
    total = tl.zeros([BLOCK_K, BLOCK_C], ACC)
    for first in range(start, end, BLOCK_P):
        place = first + tl.arange(0, BLOCK_P)
        image = place // (out_height * out_width)
        out_h, out_w = place // out_width % out_height, place % out_width
        h, h_inside = tap_over(out_h, tap // S, stride_h, padding_h, dilation_h, height, False)
        w, w_inside = tap_over(out_w, tap % S, stride_w, padding_w, dilation_w, width, False)
        counts = place < end
        grad_row = image * grad_stride_n + out_h * grad_stride_h + out_w * grad_stride_w
        grad = tl.load(
            grad_ptr + filter_at[:, None] * grad_stride_k + grad_row[None, :],
            mask=(k < filters)[:, None] & counts[None, :], other=0,
        )  # fmt: skip
        x_row = image * x_stride_n + h * x_stride_h + w * x_stride_w
        x = tl.load(
            x_ptr + x_row[:, None] + channel_at[None, :] * x_stride_c,
            mask=(counts & h_inside & w_inside)[:, None] & (c < channels)[None, :], other=0,
        )  # fmt: skip
        total = tl.dot(grad, x, total, input_precision="ieee", out_dtype=ACC)
    partial_ptr += tl.program_id(2).to(tl.int64) * groups * filters * taps * channels
    at = partial_ptr + (filter_at[:, None] * taps + tap) * channels + c[None, :]
    tl.store(at, total.to(partial_ptr.dtype.element_ty), mask=(k < filters)[:, None] & (c < channels)[None, :])


def tile_for(dtype: torch.dtype, channels: int, filters: int, contiguous: bool) -> dict[str, int]:
    """The sides of a tile and how to launch it: large where channels lie together, for else every element has an address."""
    step = 32 if channels < 64 or dtype.itemsize != 2 else 64
    if channels >= 32 and filters >= 64 and contiguous and dtype.itemsize < 4:
        return dict(BLOCK_M=128, BLOCK_N=128 if filters >= 128 else 64, BLOCK_C=step, num_warps=8, num_stages=3)
    return dict(BLOCK_M=32, BLOCK_N=32, BLOCK_C=32, num_warps=4, num_stages=2)


def image_like(x: Tensor, channels: int, sides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An image of other sizes in the memory order of x: channels last where they are, else contiguous."""
    order = torch.contiguous_format if is_plain(x) else torch.channels_last
    return torch.empty((x.shape[0], channels, *sides), dtype=dtype, device=x.device, memory_format=order)


def is_plain(x: Tensor) -> bool:
    return x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last)


def gathered_product(
    x: Tensor, weight: Tensor, out: Tensor, geometry: Geometry, backwards: bool,
    bias: Tensor | None = None, scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Into `out` the convolution of x or, backwards, the gradient of the image whose filters gave what arrives as x."""
    groups = geometry.groups
    filters, channels = out.shape[1] // groups, x.shape[1] // groups
    taps = weight.shape[2:]
    strides = weight.stride()
    ours = (strides[1], strides[0]) if backwards else strides[:2]  # of out's channels, and of x's
    places = out.shape[0] * out.shape[2] * out.shape[3]
    tile = tile_for(x.dtype, channels, filters, x.stride(1) == 1)
    grid = cdiv(places, tile["BLOCK_M"]), cdiv(filters, tile["BLOCK_N"]), groups
    launch(
        conv2d_kernel, grid, x, weight, bias, *scales, out, places, *out.shape[2:], *x.shape[2:], channels, filters,
        taps[1], taps[0] * taps[1], *geometry.numbers, *x.stride(), weight.shape[0] // groups * strides[0], *ours,
        *strides[2:], *out.stride(), BACKWARDS=backwards,
        ACC=tl.int32 if x.dtype == torch.int8 else accumulator(x.dtype), SCALED=scales[1] is not None, **tile,
    )  # fmt: skip
    return out


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the weight, in the dtype of what arrives and the memory order of the weight."""
    groups = geometry.groups
    filters, channels, *taps = grad.shape[1] // groups, x.shape[1] // groups, *weight.shape[2:]
    places = grad.shape[0] * grad.shape[2] * grad.shape[3]
    large = min(filters, channels) >= 64 and grad.dtype.itemsize == 2 and x.stride(1) == grad.stride(1) == 1
    block, step, pace = (
        (64, 64, dict(num_warps=4, num_stages=3)) if large else (32, 32, dict(num_warps=4, num_stages=2))
    )
    # Taps of many groups are more than the 65,535 that all dimensions of a grid but the first take.
    tiles = taps[0] * taps[1] * groups, cdiv(filters, block) * cdiv(channels, block)
    wanted = min(cdiv(WAVES * multiprocessors(x.device), tiles[0] * tiles[1]), places // PLACES_EACH)
    part = cdiv(max(1, cdiv(places, max(1, wanted))), step) * step
    parts = max(1, cdiv(places, part))
    dtype = grad.dtype if parts == 1 else widened(grad.dtype)
    partial = torch.empty((parts, groups * filters, *taps, channels), dtype=dtype, device=grad.device)
    launch(
        conv2d_bwd_weight_kernel, (*tiles, parts), grad, x, partial, places, *grad.shape[2:], *x.shape[2:], channels, filters,
        groups, taps[1], taps[0] * taps[1], part, *geometry.numbers, *grad.stride(), *x.stride(),
        ACC=accumulator(grad.dtype), BLOCK_K=block, BLOCK_C=block, BLOCK_P=step, **pace,
    )  # fmt: skip
    total = partial[0] if parts == 1 else sum_columns(partial.view(1, parts, -1), grad.dtype).view(partial.shape[1:])
    return total.permute(0, 3, 1, 2)
