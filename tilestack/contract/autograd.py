"""Gradients in eager mode: an implementation's forward and backward as one differentiable function.

Only what the operator's gradient names is kept, or what an implementation makes to be kept. First derivatives only:
kernels have no second one, and asking for it is an error that names the operator and the way out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.implementation import Ahead, Implementation, Keeping
from tilestack.contract.named import call_named, parameters_of
from tilestack.contract.operator import Operator, as_tuple


def differentiable(implementation: Implementation, keeping: Keeping | None = None) -> Callable:
    """The implementation as a function that PyTorch's autograd can differentiate once.

    Written out for the operator, for a call in eager mode spends as long here as in its kernel. Underscores keep our
    names apart from those of the operator.
    """
    described = implementation.operator
    run, own = implementation.forward, implementation.own_backward
    if keeping:
        run, own = keeping.forward, keeping.backward
    parameters, tensors, outputs = described.parameters, described.tensors, described.outputs
    named = parameters_of(own)
    extra = keeping.made(described) if keeping else []
    kept = [name for name in (named if keeping else described.saved) if name in (*tensors, *outputs, *extra)]
    options = [name for name in named if name in parameters and name not in tensors]
    made = {name: "_out" if len(outputs) == 1 else f"_out[{place}]" for place, name in enumerate(outputs)}
    wanted = {name: f"_wanted[{parameters.index(name)}]" for name in tensors}
    listed = lambda words: "".join(f"{word}, " for word in words)
    source = f"""
def forward(ctx, {listed(parameters)}):
    {listed(["_out", *extra]) if extra else "_out"} = _forward({listed(parameters)})
    ctx.save_for_backward({listed(made.get(name, name) for name in kept)})
    {f"ctx.options = ({listed(options)})" if options else ""}
    return _out

def backward(ctx, {listed(described.grads)}):
    {f"{listed(kept)} = ctx.saved_tensors" if kept else ""}
    {f"{listed(options)} = ctx.options" if options else ""}
    _wanted = ctx.needs_input_grad
    {f"needs = [{listed(wanted.values())}]" if "needs" in named else ""}
    if _grad_enabled():
        with _no_grad():
            _found = _as_tuple(_backward({listed(named)}))
        _found = _once_only(_implementation, _found, ({listed(described.grads)}{listed(kept)}))
    else:
        _found = _backward({listed(named)})
    {listed(f"_d{name}" for name in tensors)} = {"_as_tuple(_found)" if len(tensors) == 1 else "_found"}
    return {listed(f"_d{name} if {wanted[name]} else None" if name in tensors else "None" for name in parameters)}

def call({listed(parameters)}):
    return _apply({listed(parameters)}) if not _transforming() else _Function.apply({listed(parameters)})
"""
    scope: dict[str, Any] = dict(
        _implementation=implementation,
        _forward=run,
        _backward=own,
        _grad_enabled=torch.is_grad_enabled,
        _no_grad=torch.no_grad,
        _as_tuple=as_tuple,
        _once_only=once_only,
        _transforming=torch._C._are_functorch_transforms_active,
    )
    if implementation.repeat:
        keep = lambda name: lambda faster: scope.update({name: faster})
        scope["_forward"] = implementation.repeat(run, keep("_forward"))
        # What arrives may lie in any way, and so may what is kept, once hooks have moved it away and back.
        scope["_backward"] = implementation.repeat(own, keep("_backward"), strides_known=False)
    exec(source, scope)
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    function = type(f"{described.name}_{implementation.backend}", (torch.autograd.Function,), methods)
    # Where no transform of torch.func is at work, all that `Function.apply` adds to the method it inherits is checks.
    scope |= dict(_Function=function, _apply=super(torch.autograd.Function, function).apply)  # type: ignore[misc]
    return scope["call"]


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
