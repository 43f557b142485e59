"""A linear layer out of a product of matrices: what every rung of the ladder does around its own kernel.

    forward   out = x @ weightᵀ + bias       product(x, weightᵀ, bias)
    gradients dx = grad @ weight             product(grad, weight)
              dweight = gradᵀ @ x            product(gradᵀ, x)

A product takes its two matrices with any strides, so a transpose is a view and all three run on one kernel. All but the
last dimension of x are merged into rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered

HALVES = (torch.float16, torch.bfloat16)

# (a [M, K], b [K, N], bias [N] or None) to [M, N], contiguous
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear_by(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weightᵀ + bias; under autocast all three are in its dtype."""
    x, weight, bias = lowered(x, weight, bias)
    return product(as_matrix(x), weight.T, bias).view(*x.shape[:-1], weight.shape[0])


def linear_gradients_by(
    product: Product, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    grad, rows = as_matrix(grad), as_matrix(x).to(grad.dtype)
    dx = product(grad, weight.to(grad.dtype), None).view(x.shape).to(x.dtype) if needs[0] else None
    dweight = product(grad.T, rows, None).to(weight.dtype) if needs[1] else None
    dbias = grad.sum(0, dtype=bias.dtype) if needs[2] and bias is not None else None
    return dx, dweight, dbias


def linear_again(product: Product, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The rows of x @ weightᵀ + bias once more, in the dtype that the forward's had."""
    return as_matrix(linear_by(product, x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)))


def has_at_most(most: int, x: Tensor) -> bool | str:
    """Whether x has rows, and not too many; for the `when` of products that are made for few."""
    rows = x.shape[:-1].numel()
    return 0 < rows <= most or f"it takes 1 to {most} rows, not {rows}"
