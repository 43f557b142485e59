"""conv2d of images with few channels, such as a network's first: the taps along a line of the filter become channels.

    x [N, C, H, W]  ──▶  lines [N, D, H, W']  ──▶  implicit GEMM, R × 1 taps over D channels  ──▶  out

The copy (`lines.py`) costs a write and a read of D · W' / (C · W) times the image. For it, the products are the ordinary ones
(`implicit_gemm.py`, `weight_gradient.py`) at their full tiles, with vectors of 16 bytes, where few channels would have them
gather single elements and fill a tile of 32 channels with three. The gradient of x gains most: its product has the numbers of
a line, and not three channels, for columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.conv.configs import CONFIGS, LEAST, Config
from tilestack.kernels.conv.conv2d import bias_gradient
from tilestack.kernels.conv.implicit_gemm import Geometry, gathered_product, image_like
from tilestack.kernels.conv.lines import empty_lines, lines_of_taps, pixels_of_lines
from tilestack.kernels.conv.weight_gradient import weight_gradient
from tilestack.kernels.tiles import widened
from tilestack.ops.autocast import lowered
from tilestack.ops.conv import output_size

MOST_TAPS = 32  # along a line; a pixel's gradient is unrolled over them


def takes_lines(x: Tensor, weight: Tensor, groups: int) -> bool | str:
    if groups != 1:
        return f"it takes images without groups, not {groups}"
    if x.shape[1] >= LEAST:
        return f"it takes fewer than {LEAST} channels, not {x.shape[1]}, which fill a step of the product by themselves"
    return weight.shape[3] <= MOST_TAPS or f"it takes at most {MOST_TAPS} taps along a line, not {weight.shape[3]}"


def along_width(geometry: Geometry) -> tuple[int, int, int]:
    """Stride, padding and dilation that the lines take care of."""
    return geometry.stride[1], geometry.padding[1], geometry.dilation[1]


def along_height(geometry: Geometry) -> Geometry:
    """What is left to the product over lines."""
    return Geometry((geometry.stride[0], 1), (geometry.padding[0], 0), (geometry.dilation[0], 1), 1)


def filters_as_lines(weight: Tensor) -> Tensor:
    """[K, C, R, S] as [K, D, R, 1]."""
    return lines_of_taps(weight, weight.shape[3], 1)


def conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, needs: tuple[bool, bool, bool], config: Config,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    geometry = Geometry.of(stride, padding, dilation, groups)
    taps, places = weight.shape[3], grad.shape[3]
    dx = dweight = None
    if needs[0]:
        filters = filters_as_lines(weight.to(grad.dtype))
        # Unrounded: a pixel's gradient is a sum of several.
        lines = empty_lines(x, taps, places, widened(grad.dtype))
        gathered_product(grad, filters, lines, along_height(geometry), True, config)
        dx = pixels_of_lines(lines, image_like(x, x.shape[1], x.shape[2:], x.dtype), taps, *along_width(geometry))
    if needs[1]:
        lines = lines_of_taps(x.to(grad.dtype), taps, places, *along_width(geometry))
        found = weight_gradient(grad, lines, weight[..., :1], along_height(geometry), config)
        by_tap = found[:, : taps * x.shape[1], :, 0].unflatten(1, (taps, x.shape[1]))
        dweight = by_tap.permute(0, 2, 3, 1).contiguous(memory_format=torch.channels_last).to(weight.dtype)
    return dx, dweight, bias_gradient(grad, bias) if needs[2] else None


@implements(
    ops.conv2d,
    backend="triton_lines",
    repeat=straight_line,
    backward=conv2d_backward,
    when=takes_lines,
    configs=CONFIGS,
)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, config: Config,
) -> Tensor:  # fmt: skip
    x, weight, bias = lowered(x, weight, bias)
    geometry = Geometry.of(stride, padding, dilation, groups)
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    out = image_like(x, weight.shape[0], [output_size(*side) for side in sizes], x.dtype)
    lines = lines_of_taps(x, weight.shape[3], out.shape[3], *along_width(geometry))
    bias = None if bias is None else bias.contiguous()
    return gathered_product(lines, filters_as_lines(weight), out, along_height(geometry), False, config, bias)
