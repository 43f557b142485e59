"""Convolutions on Hopper in Gluon: the implicit GEMM whose tiles TMA gathers, one warp that loads and eight that multiply.

With channels last (NHWC), some channels under one tap, for a box of places, are a box of the image itself:

    image, H × W, and the places of a tile         a tile of BLOCK_M places is a box of images × lines × columns, whose
    +---------------+                              sides are powers of two: 2 × 8 × 8, 8 × 4 × 4, …; each step along K asks
    |  +---+        |   box under tap (0, 0)       for that box, moved by the tap, of 128 bytes of channels. What of it lies
    |  | +-|-+      |   box under tap (1, 1)       past an edge of the image comes as zeros, which is what padding means.
    |  +-|-+ |      |
    |    +---+      |                              No thread computes an address, and nothing is gathered twice into shared
    +---------------+                              memory but what taps share.

Filters are a matrix [K, taps · channels], a step's tile of which is a box too. Producer, ring and store are those of
`matmul.py`; the result leaves as a box, of which TMA writes what lies inside of the image.

With a stride of two the places under a tap are every second pixel. The image is then seen in five dimensions, [images,
lines / 2, 2, columns / 2, 2 · channels], in which they are neighbours again. The gradient of the image is a convolution of
what arrives with taps and channels exchanged; with a stride of two it is one for each remainder of lines and columns by the
stride, which meets every second tap (`conv/implicit_gemm.py`), and its result is what has five dimensions.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.kernels.conv.implicit_gemm import Geometry
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    WARPS,
    layout_of,
    next_in_ring,
    ring_of,
    tile_of,
)
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.tuning.model import Gpu, product_us

LEAST_CHANNELS = 64  # that channels and filters are multiples of, so that a box has channels of one tap alone
BOX_REGISTERS = 40  # of a thread that loads: five places of a box, and three loops around them


class Config(NamedTuple):
    """A tile of places by filters, the slots of the ring, the columns that leave at a time, and the configuration by which
    the gradient of the filters runs."""

    m: int
    n: int
    slots: int
    store_n: int
    weight: str = "128x128"

    def model_us(
        self, images: int, channels: int, height: int, width: int, filters: int, inner: int, R: int, S: int,
        stride_h: int, stride_w: int, groups: int, gpu: Gpu,
    ) -> float:  # fmt: skip
        places = images * (height // stride_h) * (width // stride_w)
        return product_us(places, filters, inner * R * S, self.m, self.n, gpu)


CONFIGS = {
    "128x128": Config(128, 128, 6, 128, "128x128 deep"),
    "128x256": Config(128, 256, 4, 128, "128x128 deep"),
    "128x64": Config(128, 64, 8, 64, "256x64"),
}
CODES_CONFIGS = {
    "128x128": Config(128, 128, 5, 64),
    "128x256": Config(128, 256, 4, 64),
    "128x64": Config(128, 64, 8, 64),
}


@gluon.jit
def place_of_box(
    number, images, lines, columns, filters,
    PHASES: gl.constexpr, IMAGES: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """First image, line, column and filter of the tile with this number, and its phase. Neighbours have the same places; the
    last phases, which meet most taps, come first."""
    filter_tiles, column_tiles = gl.cdiv(filters, BLOCK_N), gl.cdiv(columns, COLUMNS)
    line_tiles, image_tiles = gl.cdiv(lines, LINES), gl.cdiv(images, IMAGES)
    n = number % filter_tiles * BLOCK_N
    box = number // filter_tiles
    column = box % column_tiles * COLUMNS
    line = box // column_tiles % line_tiles * LINES
    box = box // column_tiles // line_tiles
    return box % image_tiles * IMAGES, line, column, n, PHASES - 1 - box // image_tiles


@gluon.jit
def taps_of_phase(phase, taps, padding, BACKWARDS: gl.constexpr, STRIDE: gl.constexpr):
    """The first tap that meets the pixels of a phase, how many do, and how far under the place the first lies."""
    first = 0
    count = taps
    under = -padding
    if BACKWARDS:
        first = (phase + padding) % STRIDE
        count = (taps - first + STRIDE - 1) // STRIDE
        under = (phase + padding - first) // STRIDE
    return first, count, under


@gluon.jit
def load_boxes(
    x_desc, weight_desc, x_s, weight_s, full, free, images, lines, columns, channels, filters, tiles, R, S,
    padding_h, padding_w, hop_h, hop_w,
    BACKWARDS: gl.constexpr, STRIDE: gl.constexpr, IMAGES: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    """The producer: every tap and channel of every tile of this program, as slots become free."""
    SLOTS: gl.constexpr = x_s.shape[0]
    IN_STRIDE: gl.constexpr = 1 if BACKWARDS else STRIDE
    OUT_STRIDE: gl.constexpr = STRIDE if BACKWARDS else 1
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        image, line, column, n, corner = place_of_box(
            tile, images, lines, columns, filters, OUT_STRIDE * OUT_STRIDE, IMAGES, LINES, COLUMNS, BLOCK_N
        )
        first_r, taps_r, top = taps_of_phase(corner // OUT_STRIDE, R, padding_h, BACKWARDS, STRIDE)
        first_s, taps_s, left = taps_of_phase(corner % OUT_STRIDE, S, padding_w, BACKWARDS, STRIDE)
        for r in range(taps_r):
            h = top + r * hop_h
            odd_h = (h % IN_STRIDE + IN_STRIDE) % IN_STRIDE
            for s in range(taps_s):
                w = left + s * hop_w
                odd_w = (w % IN_STRIDE + IN_STRIDE) % IN_STRIDE
                tap = (first_r + r * OUT_STRIDE) * S + first_s + s * OUT_STRIDE
                for c in range(0, channels, BLOCK_C):
                    mbarrier.wait(free.index(slot), phase)
                    come = full.index(slot)
                    mbarrier.expect(come, x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
                    at = [
                        image,
                        line + (h - odd_h) // IN_STRIDE,
                        odd_h,
                        column + (w - odd_w) // IN_STRIDE,
                        odd_w * channels + c,
                    ]
                    tma.async_copy_global_to_shared(x_desc, at, come, x_s.index(slot))
                    tma.async_copy_global_to_shared(
                        weight_desc,
                        [c, tap * filters + n] if BACKWARDS else [n, tap * channels + c],
                        come,
                        weight_s.index(slot),
                    )
                    slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def multiply_boxes(
    out_desc, bias_ptr, x_scale_ptr, weight_scale_ptr, x_s, weight_s, out_s, full, free,
    images, lines, columns, channels, filters, tiles, R, S, padding_h, padding_w,
    HAS_BIAS: gl.constexpr, SCALED: gl.constexpr, BACKWARDS: gl.constexpr, STRIDE: gl.constexpr,
    IMAGES: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_C: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply what arrives, and hand each finished tile to TMA."""
    SLOTS: gl.constexpr = x_s.shape[0]
    BLOCK_M: gl.constexpr = IMAGES * LINES * COLUMNS
    OUT_STRIDE: gl.constexpr = STRIDE if BACKWARDS else 1
    # Codes are added up in int32, at most 224 columns to an instruction.
    INSTRUCTION_N: gl.constexpr = 128 if SCALED and BLOCK_N > 128 else BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, INSTRUCTION_N, 32 if SCALED else 16]
    )
    slot = 0
    phase = 0
    last = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        image, line, column, n, corner = place_of_box(
            tile, images, lines, columns, filters, OUT_STRIDE * OUT_STRIDE, IMAGES, LINES, COLUMNS, BLOCK_N
        )
        _, taps_r, _ = taps_of_phase(corner // OUT_STRIDE, R, padding_h, BACKWARDS, STRIDE)
        _, taps_s, _ = taps_of_phase(corner % OUT_STRIDE, S, padding_w, BACKWARDS, STRIDE)
        steps = taps_r * taps_s * gl.cdiv(channels, BLOCK_C)
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.int32 if SCALED else gl.float32, LAYOUT)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            a = x_s.index(slot).reshape([BLOCK_M, BLOCK_C])
            b = weight_s.index(slot) if BACKWARDS else weight_s.index(slot).permute((1, 0))
            total = warpgroup_mma(a, b, total, use_acc=(step != 0), is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))  # the step before is done: its slot is free
            mbarrier.arrive(free.index(last), count=1, pred=(step != 0))
            last = slot
            slot, phase = next_in_ring(slot, phase, SLOTS)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index(last), count=1, pred=(steps != 0))
        filter_at = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        if SCALED:
            scale = gl.load(weight_scale_ptr + filter_at, mask=filter_at < filters, other=0).to(gl.float32)
            result = total.to(gl.float32) * (gl.load(x_scale_ptr).to(gl.float32) * scale)[None, :]
        else:
            result = total
        if HAS_BIAS:
            result += gl.load(bias_ptr + filter_at, mask=filter_at < filters, other=0).to(gl.float32)[None, :]
        store_box(
            out_desc, out_s, result.to(out_desc.dtype), image, line, corner // OUT_STRIDE, column,
            corner % OUT_STRIDE * filters + n, BLOCK_N // out_s.shape[4],
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def store_box(out_desc, out_s, tile, image, line, odd_h, column, channel, PARTS: gl.constexpr):
    """Store a tile through one buffer, in 1, 2 or 4 parts of its columns; the last is still on its way on return."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    if PARTS == 1:
        tma.store_wait(pendings=0)
        out_s.reshape([ROWS, WIDTH]).store(tile)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [image, line, odd_h, column, channel], out_s)
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = tile.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        store_box(out_desc, out_s, left, image, line, odd_h, column, channel, PARTS // 2)
        store_box(out_desc, out_s, right, image, line, odd_h, column, channel + HALF, PARTS // 2)


@gluon.jit
def conv2d_hopper_kernel(
    x_desc, weight_desc, out_desc, bias_ptr, x_scale_ptr, weight_scale_ptr,  # boxes of images, [K, taps · C], images; [K], [], [K], or None
    images, lines, columns, channels, filters, tiles, R, S, padding_h, padding_w, hop_h, hop_w,
    BACKWARDS: gl.constexpr, STRIDE: gl.constexpr, IMAGES: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_C: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    x_s, weight_s, full, free = ring_of(x_desc, weight_desc, SLOTS)
    out_s = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    SCALED: gl.constexpr = weight_scale_ptr is not None
    gl.warp_specialize(
        [
            (multiply_boxes, (
                out_desc, bias_ptr if HAS_BIAS else 0, x_scale_ptr if SCALED else 0, weight_scale_ptr if SCALED else 0,
                x_s, weight_s, out_s, full, free, images, lines, columns, channels, filters, tiles, R, S, padding_h, padding_w,
                HAS_BIAS, SCALED, BACKWARDS, STRIDE, IMAGES, LINES, COLUMNS, BLOCK_N, BLOCK_C, WARPS,
            )),
            (load_boxes, (
                x_desc, weight_desc, x_s, weight_s, full, free, images, lines, columns, channels, filters, tiles, R, S,
                padding_h, padding_w, hop_h, hop_w, BACKWARDS, STRIDE, IMAGES, LINES, COLUMNS, BLOCK_N, BLOCK_C,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@functools.cache
def box_of_places(images: int, lines: int, columns: int, places: int) -> tuple[int, int, int]:
    """The sides of a box of so many places, powers of two, of which the fewest cover all; of equals the widest."""
    powers = [1 << bit for bit in range(places.bit_length())]
    boxes = [(places // (h * w), h, w) for w in reversed(powers) for h in reversed(powers) if h * w <= places]
    return min(boxes, key=lambda box: cdiv(images, box[0]) * cdiv(lines, box[1]) * cdiv(columns, box[2]))


def tile_of_image(image: Tensor, stride: int, box: tuple[int, int, int], channels: int) -> Tile:
    """An image as [images, lines / stride, stride, columns / stride, stride · channels], in boxes of so many channels."""
    images, depth, height, width = image.shape
    pixel, line = depth, depth * width
    shape = images, height // stride, stride, width // stride, stride * depth
    strides = line * height, line * stride, line, pixel * stride, 1
    block = box[0], box[1], 1, box[2], channels
    return Tile(image, shape, strides, block, layout_of(block, image.dtype))


def aligned(image: Tensor) -> Tensor:
    """The image with its channels together and beginning on 16 bytes, as TMA wants it; copied where it is not so."""
    image = image.contiguous(memory_format=torch.channels_last)
    return image if image.data_ptr() % 16 == 0 else image.clone()


def convolve(
    x: Tensor, weight: Tensor, out: Tensor, geometry: Geometry, backwards: bool, config: Config,
    bias: Tensor | None = None, scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Into `out` the convolution of x or, backwards, the gradient of the image whose filters gave what arrives as x."""
    (images, channels, *_), (_, filters, *sides), (K, C, R, S) = x.shape, out.shape, weight.shape
    stride, dilation = geometry.stride[0], geometry.dilation
    in_stride, out_stride = (1, stride) if backwards else (stride, 1)
    lines, columns = sides[0] // out_stride, sides[1] // out_stride
    box = box_of_places(images, lines, columns, config.m)
    step = min(K_BYTES // x.element_size(), channels & -channels)
    n = min(config.n, filters & -filters)
    boxes = cdiv(images, box[0]) * cdiv(lines, box[1]) * cdiv(columns, box[2])
    tiles = out_stride**2 * boxes * (filters // n)
    x, weight = aligned(x), aligned(weight)
    matrix = weight.permute(0, 2, 3, 1).reshape(K, R * S * C)
    launch(
        conv2d_hopper_kernel, (min(multiprocessors(x.device), tiles),),
        tile_of_image(x, in_stride, box, step), tile_of(matrix, (step, n) if backwards else (n, step)),
        tile_of_image(out, out_stride, box, min(config.store_n * 2 // out.element_size(), n)), bias, *scales,
        images, lines, columns, channels, filters, tiles, R, S, *geometry.padding,
        *(-dilation[0], -dilation[1]) if backwards else dilation,
        BACKWARDS=backwards, STRIDE=stride, IMAGES=box[0], LINES=box[1], COLUMNS=box[2], BLOCK_N=n, BLOCK_C=step,
        SLOTS=config.slots, WARPS=WARPS, PRODUCER_REGISTERS=BOX_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return out
