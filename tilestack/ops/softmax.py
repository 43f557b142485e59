"""Softmax: each row of scores becomes a distribution."""

import torch
from torch import Tensor

from tilestack.ops.cases import ROW_BENCHES, ROW_CHECKS, cases
from tilestack.ops.contract import Cost, operator
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


@operator(
    cases=cases(
        softmax_case,
        check=[*((*shape, -1) for shape in ROW_CHECKS), (4, 5, 6, 1), (33, 2, 0)],
        bench=[(*shape, -1) for shape in ROW_BENCHES],
    )
    + cases(masked_case, check=[(8, 40)]),
    cost=lambda x: Cost(flops=5 * x.numel(), backward_flops=4 * x.numel()),
    check=dim_exists,
    gradient=softmax_gradient,
)
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along a dimension; its gradient needs only the output."""
    shifted = torch.exp(wide(x) - wide(x).amax(dim, keepdim=True)) if x.numel() else wide(x)
    return (shifted / shifted.sum(dim, keepdim=True)).to(x.dtype)
