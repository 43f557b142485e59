"""Gradients in eager mode: an implementation's forward and backward as one function that autograd can differentiate.

Only what the operator's gradient names is kept, or the extras a forward hands on. First derivatives only: kernels have
no second one, and asking for it is an error that names the operator and the way out.

The function is written once for an implementation. What belongs to a signature, its repeated forward and backward, is a
`Pair` that goes through it as its first argument, so a new signature costs two objects.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.implementation import Extras, Implementation
from tilestack.contract.named import call_named, parameters_of
from tilestack.contract.operator import Operator, as_tuple
from tilestack.contract.source import lines, listed, write_function


class Pair:
    """The forward and backward of one signature; each may be replaced by its repeated self."""

    __slots__ = ("backward", "forward")

    def __init__(self, forward: Callable, backward: Callable, repeat: Callable | None):
        self.forward, self.backward = forward, backward
        if repeat:
            self.forward = repeat(forward, functools.partial(setattr, self, "forward"))
            # What arrives may lie in any way, and so may what is kept, once hooks have moved it away and back.
            self.backward = repeat(backward, functools.partial(setattr, self, "backward"), strides_known=False)


def differentiable(
    implementation: Implementation, extras: Extras | None, forward: Callable, config: Any = None
) -> Callable:
    """A function for calls of one signature that PyTorch's autograd can differentiate once."""
    function: Any = implementation.functions.get(extras is not None)
    if function is None:
        function = implementation.functions[extras is not None] = write_function_class(implementation, extras)
    # Transforms of torch.func are refused before; without one, all that `Function.apply` adds to what it inherits is checks.
    apply = super(torch.autograd.Function, function).apply
    backward = extras.backward if extras else implementation.own_backward
    if config is not None and "config" in parameters_of(backward):
        backward = functools.partial(backward, config=config)
    if extras:
        asks = config is not None and "config" in parameters_of(extras.forward)
        forward = functools.partial(extras.forward, config=config) if asks else extras.forward
    return functools.partial(apply, Pair(forward, backward, implementation.repeat))


def write_function_class(implementation: Implementation, extras: Extras | None) -> type[torch.autograd.Function]:
    """Whose `apply` takes (pair, *arguments). Underscores keep our names apart from those of the operator."""
    op = implementation.operator
    parameters, tensors, outputs = op.parameters, op.tensors, op.outputs
    named = [n for n in parameters_of(extras.backward if extras else implementation.own_backward) if n != "config"]
    handed = extras.names(op) if extras else []
    overwritten = [name for name in handed if extras and name in extras.overwrites]
    kept = [name for name in (named if extras else op.saved) if name in (*tensors, *outputs, *handed)]
    options = [name for name in named if name in parameters and name not in tensors]
    made = {name: "_out" if len(outputs) == 1 else f"_out[{place}]" for place, name in enumerate(outputs)}
    wanted = {name: f"_wanted[{parameters.index(name) + 1}]" for name in tensors}
    needs = f"[{listed(wanted.values())}]"
    asks = extras is not None and extras.asks_needs
    # Extras are made from arguments: of one that is not kept besides, a second derivative could not even be refused later.
    linked = not handed or any(name in kept for name in outputs)
    unlinked = [wanted[name] for name in tensors if not linked and name not in kept]
    text = f"""
def forward(ctx, _pair, {listed(parameters)}):
{
        lines(
            f"ctx.kept = (_pair, {listed(options)})",
            "_wanted = ctx.needs_input_grad" if asks else "",
            f"{listed(['_out', *handed]) if handed else '_out'} = _pair.forward({listed(parameters)}{f'needs={needs}' if asks else ''})",
            f"ctx.save_for_backward({listed(made.get(name, name) for name in kept)})",
        )
    }
    return _out

def backward(ctx, {listed(op.grads)}):
{
        lines(
            f"{listed(kept)} = ctx.saved_tensors" if kept else "",
            f"{listed(['_pair', *options])} = ctx.kept",
            "_wanted = ctx.needs_input_grad",
            f"needs = {needs}" if "needs" in named else "",
            *(f"if {name} is not None and _keeps_graph(): {name} = {name}.clone()" for name in overwritten),
        )
    }
    if _grad_enabled():
        if {" or ".join(unlinked) or "False"}:
            raise _no_second_derivative(_implementation.operator.name, _implementation.backend)
        with _no_grad():
            _found = _as_tuple(_pair.backward({listed(named)}))
        _found = _once_only(_implementation, _found, ({listed(op.grads)}{
        listed(n for n in kept if n not in overwritten)
    }))
    else:
        _found = _pair.backward({listed(named)})
    try:
        {listed(f"_d{name}" for name in tensors)} = {"_as_tuple(_found)" if len(tensors) == 1 else "_found"}
    except (TypeError, ValueError):
        raise _miscounted(_implementation, _found) from None
    return None, {listed(f"_d{name} if {wanted[name]} else None" if name in tensors else "None" for name in parameters)}
"""
    scope: dict[str, Any] = dict(
        _implementation=implementation,
        _grad_enabled=torch.is_grad_enabled,
        _no_grad=torch.no_grad,
        _as_tuple=as_tuple,
        _once_only=once_only,
        _miscounted=miscounted,
        _no_second_derivative=no_second_derivative,
        _keeps_graph=torch._C._autograd._get_current_graph_task_keep_graph,
    )
    write_function("forward", text, scope)
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    return type(f"{op.name}_{implementation.backend}", (torch.autograd.Function,), methods)


def miscounted(implementation: Implementation, found: Any) -> TypeError:
    """The error for a backward that does not return a gradient for each tensor argument."""
    op = implementation.operator
    return TypeError(
        f"the backward of {op.name} on {implementation.backend} returned {len(as_tuple(found))} gradients; it returns one "
        f"for each of {', '.join(op.tensors)}, None where there is none"
    )


def once_only(
    implementation: Implementation, gradients: tuple[Tensor | None, ...], sources: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients that refuse to be differentiated again, by what they were made from or on the way to anything else."""
    about = implementation.operator.name, implementation.backend
    return tuple(
        None if g is None else OnceOnly.apply(*about, g.detach().requires_grad_(), *sources) for g in gradients
    )


def no_second_derivative(operator: str, backend: str) -> NotImplementedError:
    return NotImplementedError(
        f"{operator} has no second derivative on {backend}; run it `with tilestack.backend({operator}='torch')` to differentiate twice"
    )


class OnceOnly(torch.autograd.Function):
    """Passes a first derivative on and refuses to differentiate it again."""

    @staticmethod
    def forward(ctx, operator, backend, gradient, *sources):
        ctx.about = operator, backend
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise no_second_derivative(*ctx.about)


def gradient_of_definition(op: Operator, available: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The gradients in plain PyTorch: the declared formula, or the derivative of the definition, one per tensor argument."""
    if op.gradient is not None:
        return as_tuple(call_named(op.gradient, available))
    needs = available["needs"]
    wanted = [name for name, needed in zip(op.tensors, needs, strict=True) if needed]
    with torch.enable_grad():
        arguments = {name: available[name] for name in op.parameters}
        arguments |= {name: available[name].detach().requires_grad_() for name in wanted}
        out = as_tuple(op.definition(**arguments))
        arriving = [available[name] for name in op.grads]
        found = dict(
            zip(
                wanted,
                torch.autograd.grad(out, [arguments[name] for name in wanted], arriving, allow_unused=True),
                strict=True,
            )
        )
    return tuple(found.get(name) for name in op.tensors)


def per_parameter(
    op: Operator, gradients: tuple[Tensor | None, ...], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensor arguments laid out over all parameters, as autograd wants them."""
    found = {name: gradient for name, gradient, needed in zip(op.tensors, gradients, needs, strict=True) if needed}
    return tuple(found.get(name) for name in op.parameters)
