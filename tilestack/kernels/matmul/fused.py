"""Linear layers with what follows them, on the pipelined product: the epilogue of its kernel, and the gradients.

    forward    out = dropout(activation(pre)) + residual,  pre = x @ weightᵀ + bias
    backward   dpre = dropout(grad) · activation′(pre)          one pass over M · N
               dx = dpre @ weight, dweight = dpreᵀ @ x, dbias = Σ dpre, dresidual = grad

Where a gradient is wanted of an activation, the forward stores pre too, and hands it to the backward; without one to
remember it, the backward multiplies again.
"""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.epilogue import Epilogue, epilogue_backward
from tilestack.kernels.matmul.pipelined import pipelined_product
from tilestack.kernels.matmul.products import linear_again, linear_gradients_by
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered

Gradients = tuple[Tensor | None, ...]


def fused_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str,
    p: float, keep_pre: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and what its activation was given if that is to be kept."""
    x, weight, bias, residual = lowered(x, weight, bias, residual)
    rows, columns = as_matrix(x), weight.shape[0]
    pre = torch.empty((len(rows), columns), dtype=x.dtype, device=x.device) if keep_pre else None
    epilogue = Epilogue(activation, None if residual is None else as_matrix(residual), seed, p, pre)
    out = pipelined_product(rows, weight.T, bias, epilogue)
    return out.view(*x.shape[:-1], columns), pre


def fused_linear_and_pre(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str, p: float
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return fused_product(x, weight, bias, residual, seed, activation, p, keep_pre=True)


def fused_linear_backward_from_pre(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
    activation: str, p: float, needs: tuple[bool, ...], pre: Tensor | None,
) -> Gradients:  # fmt: skip
    dpre = epilogue_backward(as_matrix(grad), pre, activation, seed, p)
    dx, dweight, dbias = linear_gradients_by(pipelined_product, dpre, x, weight, bias, needs[:3])
    dresidual = grad.to(residual.dtype) if residual is not None and needs[3] else None
    return dx, dweight, dbias, dresidual, None


def fused_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
    activation: str, p: float, needs: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    pre = None if activation == "none" else linear_again(pipelined_product, grad.dtype, x, weight, bias)
    return fused_linear_backward_from_pre(grad, x, weight, bias, residual, seed, activation, p, needs, pre)


def empty_pre(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(), weight.shape[0]), dtype=lowered(x)[0].dtype)


@implements(
    ops.fused_linear,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=fused_linear_backward,
    extras=Extras(
        fused_linear_and_pre,
        fused_linear_backward_from_pre,
        when=lambda activation: activation != "none",
        fake=empty_pre,
    ),
)
def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str, p: float
) -> Tensor:  # fmt: skip
    return fused_product(x, weight, bias, residual, seed, activation, p, keep_pre=False)[0]
