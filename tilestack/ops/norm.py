"""Normalisation over the last dimension: RMSNorm and LayerNorm, alone or of a residual sum."""

import torch
from torch import Tensor

from tilestack.contract.cases import ROW_BENCHES, ROW_CHECKS, Case, cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide

# A row of one element is its own mean and a row of two is always ±1: their gradients are rounding around zero, which
# nothing can be held against.
CENTRED_CHECKS = [shape for shape in ROW_CHECKS if shape[-1] != 1] + [(1, 3)]
LONG_CHECKS = [(4, 1024), (1, 8192), (3, 8200), (1, 12001), (2, 33000)]  # longer than tiles of one, two and no sums
RAGGED_CHECK = (9, 1029)  # rows that start in every place between two 16-byte borders


def rms_case(make, *size):
    return dict(x=make.normal(*size, scale=3, mean=0.5), weight=make.normal(size[-1], mean=1))


def plain_case(make, *size):
    return dict(x=make.normal(*size, scale=3, mean=0.5))


def layer_case(make, *size):
    return rms_case(make, *size) | dict(bias=make.normal(size[-1]))


def mixed(build):
    """The same case with its parameters in float32 where x is narrower."""

    def build_mixed(make, *size):
        arguments = build(make, *size)
        return arguments | {name: wide(arguments[name]) for name in ("weight", "bias") if name in arguments}

    return build_mixed


def with_residual(build):
    return lambda make, *size: build(make, *size) | dict(residual=make.normal(*size, scale=2))


def row_cases(build, checks=ROW_CHECKS) -> list[Case]:
    """Rows of every awkward length, without a weight, in mixed dtypes, and at sizes worth measuring."""
    bare = lambda make, *size: {name: t for name, t in build(make, *size).items() if name in ("x", "residual")}
    return [
        *cases(build, check=[*checks, RAGGED_CHECK, *LONG_CHECKS], bench=ROW_BENCHES),
        *cases(mixed(build), check=[(3, 66)]),
        *cases(bare, check=[(3, 64)]),
    ]


def fits_rows(x: Tensor, weight: Tensor | None) -> bool | str:
    if x.ndim == 0:
        return "x needs at least one dimension"
    return (
        weight is None
        or weight.shape == x.shape[-1:]
        or f"weight must have shape {tuple(x.shape[-1:])}, the last dimension of x, not {tuple(weight.shape)}"
    )


def like_weight(weight: Tensor | None, bias: Tensor | None) -> bool | str:
    if bias is not None and weight is None:
        return "a bias needs a weight"
    if bias is not None and weight is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        return f"bias must be like weight, {weight.dtype} {tuple(weight.shape)}, not {bias.dtype} {tuple(bias.shape)}"
    return True


def like_x(x: Tensor, residual: Tensor) -> bool | str:
    return (residual.shape == x.shape and residual.dtype == x.dtype) or (
        f"residual must be like x, {x.dtype} {tuple(x.shape)}, not {residual.dtype} {tuple(residual.shape)}"
    )


def first_objection(*answers: bool | str) -> bool | str:
    return next((answer for answer in answers if answer is not True), True)


@operator(
    cases=row_cases(rms_case),
    cost=lambda x: Cost(flops=4 * x.numel(), backward_flops=9 * x.numel()),
    check=fits_rows,
)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean of squares in float32."""
    wide_x = wide(x)
    normal = (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else normal * weight


@operator(
    cases=row_cases(layer_case, CENTRED_CHECKS) + cases(rms_case, check=[(3, 65)]),
    cost=lambda x, weight: Cost(flops=7 * x.numel(), backward_flops=12 * x.numel(), backward_read=[x, weight]),
    check=lambda x, weight, bias: first_objection(like_weight(weight, bias), fits_rows(x, weight)),
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


def gradient_of_sum(
    grad: Tensor, grad_residual: Tensor, summed: Tensor, weight: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(of the sum, of weight, of bias) for a norm of `summed`, which is also handed on and has a gradient as such."""
    x, wide_grad = wide(summed), wide(grad)
    if centred:
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normal = x * rstd
    g = wide_grad if weight is None else wide_grad * wide(weight)
    dx = g - normal * (g * normal).mean(-1, keepdim=True)
    if centred:
        dx = dx - g.mean(-1, keepdim=True)
    dsum = (dx * rstd + wide(grad_residual)).to(summed.dtype)
    if weight is None:
        return dsum, None, None
    over_rows = lambda t: t.sum_to_size(weight.shape).to(weight.dtype)
    return dsum, over_rows(wide_grad * normal), over_rows(wide_grad)


def add_rms_norm_gradient(grad_out, grad_residual_out, weight, eps, residual_out):
    dsum, dweight, _ = gradient_of_sum(grad_out, grad_residual_out, residual_out, weight, eps, centred=False)
    return dsum, dsum, dweight


def add_layer_norm_gradient(grad_out, grad_residual_out, weight, eps, residual_out, needs):
    dsum, dweight, dbias = gradient_of_sum(grad_out, grad_residual_out, residual_out, weight, eps, centred=True)
    return dsum, dsum, dweight, dbias if needs[3] else None


@operator(
    cases=row_cases(with_residual(rms_case)),
    cost=lambda x, weight: Cost(flops=5 * x.numel(), backward_flops=10 * x.numel(), backward_write=[x, weight]),
    check=lambda x, residual, weight: first_objection(like_x(x, residual), fits_rows(x, weight)),
    gradient=add_rms_norm_gradient,
    outputs=("out", "residual_out"),
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): a layer's norm and the residual it hands on."""
    summed = x + residual
    return rms_norm.definition(summed, weight, eps), summed


@operator(
    cases=row_cases(with_residual(layer_case), CENTRED_CHECKS) + cases(with_residual(rms_case), check=[(3, 65)]),
    cost=lambda x, weight, bias: Cost(
        flops=8 * x.numel(), backward_flops=13 * x.numel(), backward_write=[x, weight, bias]
    ),
    check=lambda x, residual, weight, bias: first_objection(
        like_x(x, residual), like_weight(weight, bias), fits_rows(x, weight)
    ),
    gradient=add_layer_norm_gradient,
    outputs=("out", "residual_out"),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual): a layer's norm and the residual it hands on."""
    summed = x + residual
    return layer_norm.definition(summed, weight, bias, eps), summed
