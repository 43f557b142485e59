"""Gradients in eager mode: an implementation's forward and backward as one differentiable function.

Only what the operator's gradient names is kept. First derivatives only: kernels have no second one, and asking for it
is an error that names the operator and the way out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.ops.contract import Ahead, Implementation, Operator, as_tuple, call_named, parameters_of


def differentiable(implementation: Implementation) -> Callable:
    """The implementation as a function that PyTorch's autograd can differentiate once.

    All that depends on names is worked out here, so that a call only picks positions.
    """
    described, forward, backward = implementation.operator, implementation.forward, implementation.own_backward
    position = described.parameters.index
    named = parameters_of(backward)
    tensor_positions = [position(name) for name in described.tensors]
    kept_inputs = [name for name in described.saved if name in described.tensors]
    kept_outputs = [name for name in described.outputs if name in described.saved]
    options = [name for name in named if name in described.parameters and name not in described.tensors]
    input_positions, option_positions = [position(name) for name in kept_inputs], [position(name) for name in options]
    output_positions = [described.outputs.index(name) for name in kept_outputs]
    available = [*described.grads, *kept_inputs, *kept_outputs, *options, "needs"]
    picks = [available.index(name) for name in named]
    nothing = [None] * len(described.parameters)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            out = forward(*values)
            kept = [values[i] for i in input_positions]
            if output_positions:
                outputs = (out,) if isinstance(out, Tensor) else out
                kept += [outputs[i] for i in output_positions]
            ctx.save_for_backward(*kept)
            ctx.options = [values[i] for i in option_positions]
            return out

        @staticmethod
        def backward(ctx, *arriving):
            wanted = ctx.needs_input_grad
            kept = ctx.saved_tensors
            values = (*arriving, *kept, *ctx.options, [wanted[i] for i in tensor_positions])
            if torch.is_grad_enabled():
                with torch.no_grad():
                    found = as_tuple(backward(*[values[i] for i in picks]))
                found = once_only(implementation, found, (*arriving, *kept))
            else:
                found = backward(*[values[i] for i in picks])
            gradients = nothing.copy()
            for i, gradient in zip(
                tensor_positions, found if isinstance(found, tuple) else as_tuple(found), strict=True
            ):
                if wanted[i]:
                    gradients[i] = gradient
            return tuple(gradients)

    Differentiable.__name__ = Differentiable.__qualname__ = f"{described.name}_{implementation.backend}"
    return Differentiable.apply


def differentiable_ahead(implementation: Implementation, ahead: Ahead) -> Callable:
    """The same where the forward makes the gradients and the backward scales them by the scalar that arrives."""
    described = implementation.operator
    tensor_positions = [described.parameters.index(name) for name in described.tensors]

    class DifferentiableAhead(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            ctx.needs = tuple(ctx.needs_input_grad[i] for i in tensor_positions)
            out, gradients = ahead.forward(*values, needs=ctx.needs)
            ctx.save_for_backward(*gradients)
            return out

        @staticmethod
        def backward(ctx, grad):
            # A graph that is kept may be walked again, so its gradients stay as they are and copies are scaled.
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            with torch.no_grad():
                gradients = tuple(
                    None if made is None else ahead.scale(made.clone() if kept else made, grad)
                    for made in ctx.saved_tensors
                )
            if torch.is_grad_enabled():
                gradients = once_only(implementation, gradients, (grad,))
            return per_parameter(described, gradients, ctx.needs)

    DifferentiableAhead.__name__ = DifferentiableAhead.__qualname__ = f"{described.name}_{implementation.backend}_ahead"
    return DifferentiableAhead.apply


def once_only(
    implementation: Implementation, gradients: tuple[Tensor | None, ...], sources: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients that refuse to be differentiated again, by what they were made from or on the way to anything else."""
    about = implementation.operator.name, implementation.backend
    return tuple(
        None if g is None else OnceOnly.apply(*about, g.detach().requires_grad_(), *sources) for g in gradients
    )


class OnceOnly(torch.autograd.Function):
    """Passes a first derivative on and refuses to differentiate it again."""

    @staticmethod
    def forward(ctx, operator, backend, gradient, *sources):
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
