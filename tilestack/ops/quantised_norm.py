"""RMSNorm whose rows come out as codes and a scale, for the quantised matrix product that reads them. No gradients."""

import torch
from torch import Tensor

from tilestack.contract.operator import Cost, operator
from tilestack.ops.norm import first_objection, fits_rows, like_x, rms_case, row_cases, with_residual
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import quantised


def has_columns(x: Tensor) -> bool | str:
    return x.ndim == 0 or x.shape[-1] > 0 or "a row without elements has no scale"


def check_plain(x: Tensor, weight: Tensor | None) -> bool | str:
    return first_objection(has_columns(x), fits_rows(x, weight))


def check_added(x: Tensor, residual: Tensor, weight: Tensor | None) -> bool | str:
    return first_objection(like_x(x, residual), check_plain(x, weight))


def unrounded_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide_x = wide(x)
    normal = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return normal if weight is None else normal * wide(weight)


def with_columns(cases):
    return [case for case in cases if case.name != "3x0"]


plain = dict(
    cases=with_columns(row_cases(rms_case)),
    cost=lambda x: Cost(flops=7 * x.numel()),
    check=check_plain,
    outputs=("codes", "scale"),
)
added = dict(
    cases=with_columns(row_cases(with_residual(rms_case))),
    cost=lambda x: Cost(flops=8 * x.numel()),
    check=check_added,
    outputs=("codes", "scale", "residual_out"),
)


@operator(**plain)
def rms_norm_int8(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """rms_norm as int8 codes [..., columns] and a float32 scale per row [...]: the norm is codes * scale."""
    return quantised(unrounded_norm(x, weight, eps), torch.int8)


@operator(**plain)
def rms_norm_fp8(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """rms_norm as float8_e4m3fn codes [..., columns] and a float32 scale per row [...]: the norm is codes * scale."""
    return quantised(unrounded_norm(x, weight, eps), torch.float8_e4m3fn)


@operator(**added)
def add_rms_norm_int8(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm_int8(x + residual), then x + residual: the residual handed on."""
    summed = x + residual
    return *quantised(unrounded_norm(summed, weight, eps), torch.int8), summed


@operator(**added)
def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm_fp8(x + residual), then x + residual: the residual handed on."""
    summed = x + residual
    return *quantised(unrounded_norm(summed, weight, eps), torch.float8_e4m3fn), summed
