"""Normalisation over the last dimension: RMSNorm and LayerNorm."""

import torch
from torch import Tensor

from tilestack.ops.cases import ROW_BENCHES, ROW_CHECKS, cases
from tilestack.ops.contract import Cost, operator
from tilestack.ops.numerics import wide

# A row of one element is its own mean and a row of two is always ±1: their gradients are rounding around zero, which
# nothing can be held against.
CENTRED_CHECKS = [shape for shape in ROW_CHECKS if shape[-1] != 1] + [(1, 3)]


def rms_case(make, *size):
    return dict(x=make.normal(*size, scale=3, mean=0.5), weight=make.normal(size[-1], mean=1))


def plain_case(make, *size):
    return dict(x=make.normal(*size, scale=3, mean=0.5))


def layer_case(make, *size):
    return rms_case(make, *size) | dict(bias=make.normal(size[-1]))


def fits_rows(x: Tensor, weight: Tensor | None) -> bool | str:
    if x.ndim == 0:
        return "x needs at least one dimension"
    return (
        weight is None
        or weight.shape == x.shape[-1:]
        or f"weight must have shape {tuple(x.shape[-1:])}, the last dimension of x, not {tuple(weight.shape)}"
    )


def fits_rows_with_bias(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool | str:
    if bias is not None and weight is None:
        return "a bias needs a weight"
    if bias is not None and weight is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        return f"bias must be like weight, {weight.dtype} {tuple(weight.shape)}, not {bias.dtype} {tuple(bias.shape)}"
    return fits_rows(x, weight)


@operator(
    cases=cases(rms_case, check=ROW_CHECKS, bench=ROW_BENCHES) + cases(plain_case, check=[(3, 65)]),
    cost=lambda x: Cost(flops=4 * x.numel(), backward_flops=9 * x.numel()),
    check=fits_rows,
)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean of squares in float32."""
    wide_x = wide(x)
    normal = (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else normal * weight


@operator(
    cases=cases(layer_case, check=CENTRED_CHECKS, bench=ROW_BENCHES)
    + cases(rms_case, check=[(3, 65)])
    + cases(plain_case, check=[(3, 64)]),
    cost=lambda x: Cost(flops=7 * x.numel(), backward_flops=12 * x.numel()),
    check=fits_rows_with_bias,
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension, statistics in float32 and one rounding at the end."""
    wide_x = wide(x)
    centred = wide_x - wide_x.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normal.to(x.dtype)
    scaled = normal * wide(weight)
    return (scaled if bias is None else scaled + wide(bias)).to(torch.promote_types(x.dtype, weight.dtype))
