"""conv2d and conv2d_int8 on Hopper: on the boxes of `conv.py`, and where a filter has one tap, as a product.

    images [N · H · W, C] @ filters [C, K]        a single tap without a stride: with channels last, rows are pixels, which
                                                  lie one after the other, and nothing is copied (`matmul.py`)

The gradient of the filters has few elements and a sum over all places, for which the tiles of a plain product would keep a
few multiprocessors busy: it is that of any convolution, shared out among many programs (`conv/weight_gradient.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.conv.configs import CONFIGS as WEIGHT_CONFIGS
from tilestack.kernels.conv.conv2d import bias_gradient
from tilestack.kernels.conv.implicit_gemm import Geometry, image_like
from tilestack.kernels.conv.weight_gradient import weight_gradient
from tilestack.kernels.hopper import matmul
from tilestack.kernels.hopper.conv import CODES_CONFIGS, CONFIGS, LEAST_CHANNELS, Config, convolve
from tilestack.kernels.hopper.matmul import hopper_product
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.matmul.tma import can_move
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.tiles import next_power
from tilestack.ops.autocast import lowered
from tilestack.ops.conv import channels_lie_together, output_size
from tilestack.ops.quantised_linear import result_dtype


def is_product(weight: Tensor, geometry: Geometry) -> bool:
    """Whether a convolution is a product of matrices: one tap over every pixel."""
    return weight.shape[2:].numel() == 1 and geometry.stride == (1, 1) and geometry.padding == (0, 0)


def takes_boxes(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool | str:
    """Whether TMA can move the boxes of a convolution."""
    if groups != 1 or not channels_lie_together(x) or not x.numel():
        return "it takes images whose channels lie together (channels_last), and no groups"
    if x.shape[1] % LEAST_CHANNELS or weight.shape[0] % LEAST_CHANNELS:
        return f"it takes multiples of {LEAST_CHANNELS} channels and filters, not {x.shape[1]} and {weight.shape[0]}"
    step, sides = stride[0], x.shape[2:]
    if step != stride[1] or sides[0] % step or sides[1] % step or (step > 1 and max(dilation) > 1):
        return "with a stride it takes one for both sides, which divides them, and no dilation"
    return can_move(x, weight)


def takes(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool | str:
    if is_product(weight, Geometry.of(stride, padding, dilation, groups)) and groups == 1 and channels_lie_together(x):
        return can_move(x, weight)
    return takes_boxes(x, weight, stride, dilation, groups)


def product_of_pixels(image: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """An image whose pixels are those of another, [C], times b [C, K]."""
    images, _, *sides = image.shape
    rows = image.permute(0, 2, 3, 1).flatten(0, 2)  # a view where channels lie together
    n = min(config.n, max(next_power(b.shape[1]), LEAST_CHANNELS))
    tile = matmul.Config(config.m, n, config.slots, min(config.store_n, n))
    return hopper_product(rows, b, bias, tile).view(images, *sides, b.shape[1]).permute(0, 3, 1, 2)


def empty_places(x: Tensor, weight: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Memory for a convolution's result."""
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    return image_like(x, weight.shape[0], [output_size(*side) for side in sizes], dtype)


def conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, needs: tuple[bool, bool, bool], config: Config,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    geometry = Geometry.of(stride, padding, dilation, groups)
    dx = dweight = None
    if needs[0]:
        filters = weight.to(grad.dtype)
        if is_product(weight, geometry):
            dx = product_of_pixels(grad, filters.flatten(1), None, config)
        else:
            dx = convolve(grad, filters, image_like(x, x.shape[1], x.shape[2:], grad.dtype), geometry, True, config)
        dx = dx.to(x.dtype)
    if needs[1]:
        tile = WEIGHT_CONFIGS[config.weight]
        dweight = weight_gradient(grad, x.to(grad.dtype), weight, geometry, tile).to(weight.dtype)
    return dx, dweight, bias_gradient(grad, bias) if needs[2] else None


@implements(
    ops.conv2d,
    backend="gluon",
    repeat=straight_line,
    backward=conv2d_backward,
    when=takes,
    dtypes=HALVES,
    configs=CONFIGS,
)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, config: Config,
) -> Tensor:  # fmt: skip
    x, weight, bias = lowered(x, weight, bias)
    geometry = Geometry.of(stride, padding, dilation, groups)
    if is_product(weight, geometry):
        return product_of_pixels(x, weight.flatten(1).T, bias, config)
    out = empty_places(x, weight, geometry, x.dtype)
    return convolve(x, weight, out, geometry, False, config, None if bias is None else bias.contiguous())


@implements(
    ops.conv2d_int8,
    backend="gluon",
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    configs=CODES_CONFIGS,
    when=takes_boxes,
)
def conv2d_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, dtype: str, config: Config,
) -> Tensor:  # fmt: skip
    geometry = Geometry.of(stride, padding, dilation, groups)
    out = empty_places(x, weight, geometry, result_dtype(weight_scale, dtype))
    bias = None if bias is None else bias.contiguous()
    return convolve(x, weight, out, geometry, False, config, bias, (x_scale, weight_scale.contiguous()))
