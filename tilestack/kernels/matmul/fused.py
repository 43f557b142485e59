"""Linear layers with what follows them, on the pipelined and the persistent product: their epilogue, and the gradients.

    forward    out = dropout(activation(pre)) + residual,  pre = x @ weightᵀ + bias
    backward   dpre = dropout(grad) · activation′(pre)          one pass over M · N
               dx = dpre @ weight, dweight = dpreᵀ @ x, dbias = Σ dpre, dresidual = grad

Where a gradient is wanted of an activation, the forward stores pre too, and hands it to the backward; without one to
remember it, the backward multiplies again.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.epilogue import Epilogue, epilogue_backward
from tilestack.kernels.matmul.persistent import CONFIGS, Config, persistent_product
from tilestack.kernels.matmul.pipelined import pipelined_product
from tilestack.kernels.matmul.products import HALVES, linear_again, linear_gradients_by
from tilestack.kernels.matmul.tma import can_move
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered

Gradients = tuple[Tensor | None, ...]


def fused_by(
    product: Callable[..., Tensor], keep_pre: bool, x: Tensor, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, seed: Tensor | None, activation: str, p: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and what its activation was given if that is to be kept."""
    x, weight, bias, residual = lowered(x, weight, bias, residual)
    rows, columns = as_matrix(x), weight.shape[0]
    pre = torch.empty((len(rows), columns), dtype=x.dtype, device=x.device) if keep_pre else None
    epilogue = Epilogue(activation, None if residual is None else as_matrix(residual), seed, p, pre)
    out = product(rows, weight.T, bias, epilogue=epilogue)
    return out.view(*x.shape[:-1], columns), pre


def gradients_by(
    product: Callable[..., Tensor], grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, seed: Tensor | None, activation: str, p: float, needs: tuple[bool, ...], pre: Tensor | None,
) -> Gradients:  # fmt: skip
    """From what the activation was given, computed again where it was not kept."""
    if activation != "none" and pre is None:
        pre = linear_again(product, grad.dtype, x, weight, bias)
    dpre = epilogue_backward(as_matrix(grad), pre, activation, seed, p)
    dx, dweight, dbias = linear_gradients_by(product, dpre, x, weight, bias, needs[:3])
    dresidual = grad.to(residual.dtype) if residual is not None and needs[3] else None
    return dx, dweight, dbias, dresidual, None


def empty_pre(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(), weight.shape[0]), dtype=lowered(x)[0].dtype)


def has_activation(activation: str) -> bool:
    return activation != "none"


def pipelined_and_pre(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str, p: float
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return fused_by(pipelined_product, True, x, weight, bias, residual, seed, activation, p)


def pipelined_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
    activation: str, p: float, needs: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    return gradients_by(pipelined_product, grad, x, weight, bias, residual, seed, activation, p, needs, None)


def pipelined_backward_from_pre(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
    activation: str, p: float, needs: tuple[bool, ...], pre: Tensor,
) -> Gradients:  # fmt: skip
    return gradients_by(pipelined_product, grad, x, weight, bias, residual, seed, activation, p, needs, pre)


@implements(
    ops.fused_linear,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=pipelined_backward,
    extras=Extras(pipelined_and_pre, pipelined_backward_from_pre, when=has_activation, fake=empty_pre),
)
def fused_linear_pipelined(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str, p: float
) -> Tensor:  # fmt: skip
    return fused_by(pipelined_product, False, x, weight, bias, residual, seed, activation, p)[0]


def with_gradients(product: Callable[..., Tensor]) -> tuple[Callable, Callable, Callable]:
    """The forward that keeps what its backward needs, a backward without it and one with it, of a product by configurations."""

    def fused_and_pre(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str,
        p: float, config: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        by_config = functools.partial(product, config=config)
        return fused_by(by_config, True, x, weight, bias, residual, seed, activation, p)

    def backward(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
        activation: str, p: float, needs: tuple[bool, ...], config: Any,
    ) -> Gradients:  # fmt: skip
        by_config = functools.partial(product, config=config)
        return gradients_by(by_config, grad, x, weight, bias, residual, seed, activation, p, needs, None)

    def backward_from_pre(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None,
        activation: str, p: float, needs: tuple[bool, ...], pre: Tensor, config: Any,
    ) -> Gradients:  # fmt: skip
        by_config = functools.partial(product, config=config)
        return gradients_by(by_config, grad, x, weight, bias, residual, seed, activation, p, needs, pre)

    return fused_and_pre, backward, backward_from_pre


persistent_and_pre, persistent_backward, persistent_backward_from_pre = with_gradients(persistent_product)


def stores_vectors(x: Tensor, weight: Tensor) -> bool | str:
    """Beside a loop over tiles there is no room for an address of each element of a result."""
    if weight.shape[0] % 16:
        return f"it takes multiples of 16 columns, not {weight.shape[0]}"
    return can_move(x, weight)


def leaves_registers(x: Tensor, weight: Tensor, seed: Tensor | None) -> bool | str:
    if seed is not None:
        return "its loop over tiles leaves no registers for dropout"
    return stores_vectors(x, weight)


@implements(
    ops.fused_linear,
    backend="triton_persistent",
    repeat=straight_line,
    backward=persistent_backward,
    extras=Extras(persistent_and_pre, persistent_backward_from_pre, when=has_activation, fake=empty_pre),
    when=leaves_registers,
    dtypes=HALVES,
    configs={"128x128": CONFIGS["128x128"], "64x128": CONFIGS["64x128"]},
)
def fused_linear_persistent(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: None, activation: str, p: float,
    config: Config,
) -> Tensor:  # fmt: skip
    product = functools.partial(persistent_product, config=config)
    return fused_by(product, False, x, weight, bias, residual, seed, activation, p)[0]
