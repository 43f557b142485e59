"""Launch configurations of convolutions: the tile of the product, and that of the weight's gradient.

A configuration is asked for where tensor cores are filled and rows of a tile are whole vectors: half precision or int8, 32
channels and filters or more, channels last. All other calls have one tile of their own, a small one, since every element
has an address there; or, of images with few channels, one that is long and narrow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestack.kernels.tiles import next_power
from tilestack.tuning.model import Gpu, product_us

STEP_BYTES = 128  # of a row of a tile: one swizzled line of shared memory
LEAST = 32  # channels and filters that fill a tile of tensor cores
VECTOR = 16  # elements; Triton sees vectors where strides are multiples of it


class Tile(NamedTuple):
    """Rows and columns of a tile of the result, warps, and steps under way at the same time."""

    rows: int
    columns: int
    warps: int
    stages: int


class Config(NamedTuple):
    """A tile of places by filters (of pixels by channels in the gradient of x), and one of filters by channels for the
    gradient of the weight."""

    product: Tile
    weight: Tile

    def model_us(
        self, images: int, channels: int, height: int, width: int, filters: int, inner: int, R: int, S: int,
        stride_h: int, stride_w: int, groups: int, gpu: Gpu,
    ) -> float:  # fmt: skip
        """Of the forward, of all groups as if they were one."""
        places = images * (height // stride_h) * (width // stride_w)
        return product_us(places, filters, inner * R * S, self.product.rows, self.product.columns, gpu)


CONFIGS = {
    "128x128": Config(Tile(128, 128, 8, 3), Tile(64, 64, 4, 3)),
    "128x128 deep": Config(Tile(128, 128, 8, 4), Tile(128, 128, 8, 3)),
    "256x64": Config(Tile(256, 64, 8, 4), Tile(128, 64, 4, 4)),
    "64x64": Config(Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
}
# Sums of codes beside the largest tiles' addresses do not fit into registers.
INT8_CONFIGS = {
    name: config for name, config in CONFIGS.items() if config.product.rows * config.product.columns <= 2**14
}

SMALL = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_C=32, num_warps=4, num_stages=2)
FEW_CHANNELS = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_C=32, num_warps=8, num_stages=2)
SMALL_WEIGHT = dict(BLOCK_K=32, BLOCK_C=32, BLOCK_P=32, num_warps=4, num_stages=2)


def steps_of(image: Tensor) -> tuple[int, ...]:
    """The strides of an image or a filter, 0 where there is nothing to step to: of one tap, PyTorch's may be any number."""
    return tuple(step if size > 1 else 0 for size, step in zip(image.shape, image.stride(), strict=True))


def lies_in_vectors(image: Tensor) -> bool:
    """Whether channels lie together and every pixel's begin where a vector may."""
    step_n, step_c, *steps = steps_of(image)
    return step_c == 1 and not any(step % VECTOR for step in (step_n, *steps))


def fills_tensor_cores(dtype: torch.dtype, channels: int, filters: int) -> bool:
    return dtype.itemsize < 4 and min(channels, filters) >= LEAST


def product_launch(config: Config, x: Tensor, channels: int, filters: int, merged: bool) -> dict[str, Any]:
    """The tile of a product over so many channels of x, `merged` where they are those of a line of taps, and its launch."""
    if merged and x.dtype.itemsize < 4:
        return FEW_CHANNELS
    if not (fills_tensor_cores(x.dtype, channels, filters) and lies_in_vectors(x)):
        return SMALL
    rows, columns, warps, stages = config.product
    step = min(STEP_BYTES // x.element_size(), next_power(channels))
    return dict(
        BLOCK_M=rows, BLOCK_N=min(columns, next_power(filters)), BLOCK_C=step, num_warps=warps, num_stages=stages
    )


def weight_launch(config: Config, grad: Tensor, x: Tensor, filters: int, channels: int) -> dict[str, Any]:
    """The tile of the weight's gradient and its launch; grad is [places, filters of all groups]."""
    in_vectors = lies_in_vectors(x) and grad.stride(1) == 1 and not grad.stride(0) % VECTOR
    if not (fills_tensor_cores(x.dtype, channels, filters) and in_vectors):
        return SMALL_WEIGHT
    rows, columns, warps, stages = config.weight
    return dict(
        BLOCK_K=min(rows, next_power(filters)), BLOCK_C=min(columns, next_power(channels)),
        BLOCK_P=STEP_BYTES // x.element_size(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
