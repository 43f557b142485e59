"""Gradients in eager mode: an implementation's forward and backward as one differentiable function.

Only what the operator's gradient names is kept. First derivatives only: kernels have no second one, and asking for it
is an error that names the operator and the way out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.ops.contract import Implementation, Operator, as_tuple, call_named, parameters_of


def differentiable(implementation: Implementation) -> Callable:
    """The implementation as a function that PyTorch's autograd can differentiate once."""
    described, backward = implementation.operator, implementation.own_backward
    forward, parameters, outputs, saved = (
        implementation.forward,
        described.parameters,
        described.outputs,
        described.saved,
    )
    kept_tensors = [name for name in saved if name in described.tensors or name in outputs]
    kept_values = [name for name in parameters_of(backward) if name not in kept_tensors and name in parameters]
    positions = {name: i for i, name in enumerate(parameters)}
    tensor_positions = [positions[name] for name in described.tensors]
    named = parameters_of(backward)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            out = forward(*values)
            results = dict(zip(outputs, as_tuple(out), strict=True))
            ctx.save_for_backward(
                *(results[name] if name in results else values[positions[name]] for name in kept_tensors)
            )
            ctx.values = {name: values[positions[name]] for name in kept_values}
            return out

        @staticmethod
        def backward(ctx, *arriving):
            available = (
                dict(zip(kept_tensors, ctx.saved_tensors, strict=True))
                | ctx.values
                | dict(zip(described.grads, arriving, strict=True))
            )
            available["needs"] = tuple(ctx.needs_input_grad[i] for i in tensor_positions)
            with torch.no_grad():
                gradients = as_tuple(backward(**{name: available[name] for name in named}))
            if torch.is_grad_enabled():
                gradients = tuple(
                    None if g is None else OnceOnly.apply(g, described.name, implementation.backend) for g in gradients
                )
            return per_parameter(described, gradients, available["needs"])

    Differentiable.__name__ = Differentiable.__qualname__ = f"{described.name}_{implementation.backend}"
    return Differentiable.apply


class OnceOnly(torch.autograd.Function):
    """Passes a first derivative on and refuses to differentiate it again."""

    @staticmethod
    def forward(ctx, gradient, operator, backend):
        ctx.about = operator, backend
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        operator, backend = ctx.about
        raise NotImplementedError(
            f"{operator} has no second derivative on {backend}; run it `with tilestack.backend({operator}='torch')` to differentiate twice"
        )


def gradient_of_definition(described: Operator, available: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The gradients in plain PyTorch: the declared formula, or the derivative of the definition, one per tensor argument."""
    if described.gradient is not None:
        return as_tuple(call_named(described.gradient, available))
    needs = available["needs"]
    wanted = [name for name, needed in zip(described.tensors, needs, strict=True) if needed]
    with torch.enable_grad():
        arguments = {name: available[name] for name in described.parameters}
        arguments |= {name: available[name].detach().requires_grad_() for name in wanted}
        out = as_tuple(described.definition(**arguments))
        arriving = [available[name] for name in described.grads]
        found = dict(
            zip(
                wanted,
                torch.autograd.grad(out, [arguments[name] for name in wanted], arriving, allow_unused=True),
                strict=True,
            )
        )
    return tuple(found.get(name) for name in described.tensors)


def per_parameter(
    described: Operator, gradients: tuple[Tensor | None, ...], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensor arguments laid out over all parameters, as autograd wants them."""
    found = {
        name: gradient for name, gradient, needed in zip(described.tensors, gradients, needs, strict=True) if needed
    }
    return tuple(found.get(name) for name in described.parameters)
