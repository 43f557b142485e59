"""Gradients in eager mode: an implementation's forward and backward as one function that autograd can differentiate.

Only what the operator's gradient names is kept, or the extras a forward hands on. First derivatives only: kernels have
no second one, and asking for it is an error that names the operator and the way out.

The function is made once for an implementation, from its `Wiring`: in C++ where `native/node.cpp` is built, else as a
`torch.autograd.Function` whose methods are written here. What belongs to a signature, its repeated forward and backward,
is a `Pair`, so a new signature costs two objects.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.implementation import Extras, Implementation
from tilestack.contract.named import call_named, parameters_of
from tilestack.contract.native.build import native_node
from tilestack.contract.operator import Operator, as_tuple
from tilestack.contract.source import lines, listed, write_function
from tilestack.contract.wiring import Wiring, wiring_of


class Pair:
    """The forward and backward of one signature; each may be replaced by its repeated self. C++ has its own, which is called."""

    __slots__ = ("backward", "forward")


def differentiable(
    implementation: Implementation, extras: Extras | None, forward: Callable, config: Any = None
) -> Callable:
    """A function for calls of one signature that PyTorch's autograd can differentiate once."""
    backward = extras.backward if extras else implementation.own_backward
    if config is not None and "config" in parameters_of(backward):
        backward = functools.partial(backward, config=config)
    if extras:
        asks = config is not None and "config" in parameters_of(extras.forward)
        forward = functools.partial(extras.forward, config=config) if asks else extras.forward
    pair, run = new_pair(implementation, extras)
    pair.forward, pair.backward = forward, backward
    if repeat := implementation.repeat:
        pair.forward = repeat(forward, functools.partial(setattr, pair, "forward"))
        # What arrives may lie in any way, and so may what is kept, once hooks have moved it away and back.
        pair.backward = repeat(backward, functools.partial(setattr, pair, "backward"), strides_known=False)
    return run


def new_pair(implementation: Implementation, extras: Extras | None) -> tuple[Any, Callable]:
    """A pair to be filled, and the function that runs it."""
    native = None if compiled_autograd_wanted() else native_node()
    made: Any = implementation.functions.get((extras is not None, native))
    if made is None:
        wiring = wiring_of(implementation, extras)
        once = functools.partial(
            differentiated_once, implementation, [wiring.tensors.index(n) for n in wiring.unlinked]
        )
        wrong = functools.partial(miscounted, implementation)
        made = wiring.in_places(native, once, wrong) if native else write_function_class(wiring, once, wrong)
        implementation.functions[extras is not None, native] = made
    if native:
        pair = native.Pair(made)
        return pair, pair
    # Transforms of torch.func are refused before; without one, all that `Function.apply` adds to what it inherits is checks.
    pair = Pair()
    return pair, functools.partial(super(torch.autograd.Function, made).apply, pair)


def compiled_autograd_wanted() -> bool:
    """Whether a compiler is to see the backward of eager calls too, for which they must be Python."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and config.compiled_autograd


def write_function_class(wiring: Wiring, once: Callable, miscounted: Callable) -> type[torch.autograd.Function]:
    """Whose `apply` takes (pair, *arguments). Underscores keep our names apart from those of the operator."""
    parameters, tensors, outputs, kept = wiring.parameters, wiring.tensors, wiring.outputs, wiring.kept
    made = {name: "_out" if len(outputs) == 1 else f"_out[{place}]" for place, name in enumerate(outputs)}
    wanted = {name: f"_wanted[{parameters.index(name) + 1}]" for name in tensors}
    needs = f"[{listed(wanted.values())}]"
    sources = [*wiring.grads, *(name for name in kept if name not in wiring.overwritten)]
    text = f"""
def forward(ctx, _pair, {listed(parameters)}):
{
        lines(
            f"ctx.kept = (_pair, {listed(wiring.options)})",
            "_wanted = ctx.needs_input_grad" if wiring.asks_needs else "",
            f"{listed(['_out', *wiring.extras]) if wiring.extras else '_out'} = "
            f"_pair.forward({listed(parameters)}{f'needs={needs}' if wiring.asks_needs else ''})",
            f"ctx.save_for_backward({listed(made.get(name, name) for name in kept)})",
        )
    }
    return _out

def backward(ctx, {listed(wiring.grads)}):
{
        lines(
            f"{listed(kept)} = ctx.saved_tensors" if kept else "",
            f"{listed(['_pair', *wiring.options])} = ctx.kept",
            "_wanted = ctx.needs_input_grad",
            f"needs = {needs}" if "needs" in wiring.named else "",
            *(f"if {name} is not None and _keeps_graph(): {name} = {name}.clone()" for name in wiring.overwritten),
        )
    }
    if _grad_enabled():
        _found = _once(_pair.backward, ({listed(wiring.named)}), ({listed(sources)}), {needs})
    else:
        _found = _pair.backward({listed(wiring.named)})
    try:
        {listed(f"_d{name}" for name in tensors)} = {"_as_tuple(_found)" if len(tensors) == 1 else "_found"}
    except (TypeError, ValueError):
        raise _miscounted(_found) from None
    return None, {listed(f"_d{name} if {wanted[name]} else None" if name in tensors else "None" for name in parameters)}
"""
    scope: dict[str, Any] = dict(
        _grad_enabled=torch.is_grad_enabled,
        _as_tuple=as_tuple,
        _once=once,
        _miscounted=miscounted,
        _keeps_graph=torch._C._autograd._get_current_graph_task_keep_graph,
    )
    write_function("forward", text, scope)
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    return type(wiring.name, (torch.autograd.Function,), methods)


def miscounted(implementation: Implementation, found: Any) -> TypeError:
    """The error for a backward that does not return a gradient for each tensor argument."""
    op = implementation.operator
    return TypeError(
        f"the backward of {op.name} on {implementation.backend} returned {len(as_tuple(found))} gradients; it returns one "
        f"for each of {', '.join(op.tensors)}, None where there is none"
    )


def differentiated_once(
    implementation: Implementation,
    unlinked: Sequence[int],
    backward: Callable,
    arguments: tuple,
    sources: tuple[Tensor | None, ...],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients that refuse to be differentiated again, by what they were made from or on the way to anything else.

    `sources` are the tensors they were made from; of those in the places `unlinked` nothing is among them.
    """
    about = implementation.operator.name, implementation.backend
    if any(needs[place] for place in unlinked):
        raise no_second_derivative(*about)
    with torch.no_grad():
        found = as_tuple(backward(*arguments))
    return tuple(None if g is None else OnceOnly.apply(*about, g.detach().requires_grad_(), *sources) for g in found)


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
