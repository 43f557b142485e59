"""A gated pair and the projection that reads it, with cuBLAS for the products and without keeping the pair.

x ──swiglu──▶ gated ──· weight──▶ out         kept for the backward: x and weight
                                              not kept: gated, half of x, which only the gradient of weight reads
grad ──· weight──▶ dgated ──▶ dx
                     x ─────▶ gated again     the kernel that makes dx has both halves in registers: one more store
"""

import torch.nn.functional as F
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.elementwise.gated import one_tensor, one_tensor_backward
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered


def swiglu_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    arriving, x_rows, product_weight = as_matrix(grad), as_matrix(x).to(grad.dtype), weight.to(grad.dtype)
    gated = grad.new_empty(x_rows.shape[0], weight.shape[1]) if needs[1] else None
    dx = one_tensor_backward(arriving @ product_weight, x_rows, "silu", False, gated) if needs[0] or needs[1] else None
    return (
        dx.view(x.shape).to(x.dtype) if dx is not None and needs[0] else None,
        None if gated is None else (arriving.T @ gated).to(weight.dtype),
        arriving.sum(0, dtype=weight.dtype) if needs[2] else None,
    )


@implements(ops.swiglu_linear, backend="triton", backward=swiglu_linear_backward)
def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight, bias = lowered(x, weight, bias)
    return F.linear(one_tensor(x, "silu", False), weight, bias)
