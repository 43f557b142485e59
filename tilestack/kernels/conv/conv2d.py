"""conv2d and conv2d_int8 on the implicit GEMM."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.conv.configs import CONFIGS, INT8_CONFIGS, Config
from tilestack.kernels.conv.implicit_gemm import Geometry, gathered_product, image_like
from tilestack.kernels.conv.weight_gradient import weight_gradient
from tilestack.kernels.tiles import widened
from tilestack.ops.autocast import lowered
from tilestack.ops.conv import channels_lie_together, output_size


def beside(x: Tensor, weight: Tensor) -> Tensor:
    """The weight with its channels together where those of x are, so that both are read in whole vectors."""
    return weight.contiguous(memory_format=torch.channels_last) if channels_lie_together(x) else weight


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, dtype: torch.dtype, config: Config,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    sizes = zip(x.shape[2:], weight.shape[2:], geometry.stride, geometry.padding, geometry.dilation, strict=True)
    out = image_like(x, weight.shape[0], [output_size(*side) for side in sizes], dtype)
    bias = None if bias is None else bias.contiguous()
    return gathered_product(x, beside(x, weight), out, geometry, False, config, bias, scales)


def bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else grad.sum((0, 2, 3), dtype=widened(grad.dtype)).to(bias.dtype)


def conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, needs: tuple[bool, bool, bool], config: Config,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    geometry = Geometry.of(stride, padding, dilation, groups)
    dx = dweight = None
    if needs[0]:
        dx = image_like(x, x.shape[1], x.shape[2:], grad.dtype)
        dx = gathered_product(grad, beside(grad, weight.to(grad.dtype)), dx, geometry, True, config).to(x.dtype)
    if needs[1]:
        dweight = weight_gradient(grad, x.to(grad.dtype), weight, geometry, config).to(weight.dtype)
    return dx, dweight, bias_gradient(grad, bias) if needs[2] else None


@implements(ops.conv2d, backend="triton", repeat=straight_line, backward=conv2d_backward, configs=CONFIGS)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, config: Config,
) -> Tensor:  # fmt: skip
    x, weight, bias = lowered(x, weight, bias)
    return convolution(x, weight, bias, Geometry.of(stride, padding, dilation, groups), x.dtype, config)


@implements(ops.conv2d_int8, backend="triton", repeat=straight_line, configs=INT8_CONFIGS)
def conv2d_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, dtype: str, config: Config,
) -> Tensor:  # fmt: skip
    made = getattr(torch, dtype) if dtype else weight_scale.dtype
    scales = x_scale, weight_scale.contiguous()
    return convolution(x, weight, bias, Geometry.of(stride, padding, dilation, groups), made, config, scales)
