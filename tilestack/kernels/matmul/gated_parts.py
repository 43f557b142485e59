"""The first half of a gated feed-forward layer for many rows: a product by whoever multiplies fastest, then the gate.

    x ──· weightᵀ + bias──▶ pair [M, 2N] ──silu(gate) · up──▶ out [M, N]
                             └─ kept where a gradient is wanted

One kernel for both (`gated.py`) saves writing and reading the pair, 8 bytes of memory traffic for each of M · N results in
half precision, which for 4 K operations each is little where K is large; what it multiplies with is the third rung of the
ladder. So here the pair is written, and the product is cuBLAS's, or the top rung on Hopper (`hopper/gated.py`). So are the
two products of the backward.
"""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.kernels.elementwise.gated import one_tensor
from tilestack.kernels.matmul.gated import empty_pair, gated_gradients_by
from tilestack.kernels.matmul.products import Product
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered


def gated_after(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result, and the pair that it was made of."""
    x, weight, bias = lowered(x, weight, bias)
    pair = product(as_matrix(x), weight.T, bias)
    return one_tensor(pair, "silu", False).view(*x.shape[:-1], weight.shape[0] // 2), pair


def cublas_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def linear_swiglu_and_pair(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return gated_after(cublas_product, x, weight, bias)


def linear_swiglu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    return gated_gradients_by(cublas_product, grad, x, weight, bias, needs, None)


def linear_swiglu_backward_from_pair(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], pair: Tensor
) -> tuple[Tensor | None, ...]:
    return gated_gradients_by(cublas_product, grad, x, weight, bias, needs, pair)


@implements(
    ops.linear_swiglu,
    backend="triton_parts",
    backward=linear_swiglu_backward,
    extras=Extras(linear_swiglu_and_pair, linear_swiglu_backward_from_pair, when=lambda x: True, fake=empty_pair),
)
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return gated_after(cublas_product, x, weight, bias)[0]
