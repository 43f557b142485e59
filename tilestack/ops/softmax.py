"""Softmax and its kin: a row of scores becomes a distribution, its logarithm, or the logarithm of its normaliser."""

import torch
from torch import Tensor

from tilestack.contract.cases import ROW_BENCHES, ROW_CHECKS, cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide


def softmax_case(make, *size):
    *shape, dim = size
    return dict(x=make.normal(*shape, scale=4), dim=dim)


def masked_case(make, rows, columns):
    """The upper triangle masked with -inf, as attention does; the first row keeps a single score."""
    return dict(
        x=make.normal(rows, columns).masked_fill(
            torch.ones(rows, columns, dtype=torch.bool, device=make.device).triu(1), -torch.inf
        )
    )


def dim_exists(x: Tensor, dim: int) -> bool | str:
    return (-x.ndim <= dim < x.ndim) or f"dim {dim} is out of range for a tensor of {x.ndim} dimensions"


def softmax_gradient(grad: Tensor, out: Tensor, dim: int) -> Tensor:
    inner = (wide(grad) * wide(out)).sum(dim, keepdim=True)
    return (wide(out) * (wide(grad) - inner)).to(out.dtype)


LONG_CHECKS = [(2, 8200), (2, 33000)]  # longer than a backward, and a forward, holds in registers
score_cases = cases(
    softmax_case,
    check=[*((*shape, -1) for shape in ROW_CHECKS), (4, 5, 6, 1), (33, 2, 0), *((*shape, -1) for shape in LONG_CHECKS)],
    bench=[(*shape, -1) for shape in ROW_BENCHES],
)
masked_cases = cases(masked_case, check=[(8, 40)])
larger_masked_cases = cases(masked_case, check=[(65, 65)])  # for results of -inf, which have no finite differences


@operator(
    cases=score_cases + masked_cases,
    cost=lambda x: Cost(flops=5 * x.numel(), backward_flops=4 * x.numel()),
    check=dim_exists,
    gradient=softmax_gradient,
)
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along a dimension; its gradient needs only the output."""
    shifted = torch.exp(wide(x) - wide(x).amax(dim, keepdim=True)) if x.numel() else wide(x)
    return (shifted / shifted.sum(dim, keepdim=True)).to(x.dtype)


def log_softmax_gradient(grad: Tensor, out: Tensor, dim: int) -> Tensor:
    return (wide(grad) - torch.exp(wide(out)) * wide(grad).sum(dim, keepdim=True)).to(out.dtype)


@operator(
    cases=score_cases + larger_masked_cases,
    cost=lambda x: Cost(flops=5 * x.numel(), backward_flops=4 * x.numel()),
    check=dim_exists,
    gradient=log_softmax_gradient,
)
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x - logsumexp(x) along a dimension; its gradient needs only the output."""
    return torch.log_softmax(wide(x), dim).to(x.dtype)


@operator(
    cases=score_cases + masked_cases,
    cost=lambda x: Cost(flops=4 * x.numel(), backward_flops=5 * x.numel()),
    check=dim_exists,
)
def logsumexp(x: Tensor, dim: int = -1) -> Tensor:
    """log(sum(exp(x))) along a dimension, which it drops; -inf where every score is -inf or there are none."""
    return torch.logsumexp(wide(x), dim).to(x.dtype)
