"""What torch.compile, export and opcheck see: every operator as `torch.ops.tilestack.<name>`, with its gradient.

Under a compiler the backend is chosen while tracing. One made of PyTorch calls is traced through, so that the compiler
can fuse it, unless it reads values; any other becomes one opaque operator, whose fake kernel is the definition on fake
tensors (or the `fake` that was declared) and whose gradient is the operator `<name>_backward`, or, for a backend whose
backward is the operator's own `gradient`, that formula, traced through. The results of both operators are contiguous, as
the fakes promise. Where gradients are made in the forward, the opaque operator is `<name>_<backend>_ahead`, which
returns them beside the result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import registry
from tilestack.contract.autograd import gradient_of_definition, per_parameter
from tilestack.contract.named import call_named
from tilestack.contract.operator import Operator, as_tuple

LIBRARY = torch.library.Library("tilestack", "DEF")


def define(described: Operator) -> Callable:
    """Register an operator and its gradient with torch.library; returns what a compiler traces for a call."""

    def run(*values: Any) -> Any:
        with torch.no_grad():
            return fresh(described(*values), values)

    def fake(*values: Any) -> Any:
        return fresh(described.fake(*values), values)

    register(described.name, described.schema, run, fake)
    opaque = getattr(torch.ops.tilestack, described.name)
    gradient = Gradient(described)
    torch.library.register_autograd(
        f"tilestack::{described.name}", gradient.backward, setup_context=gradient.setup_context, lib=LIBRARY
    )

    def traced(*values: Any) -> Any:
        arguments = dict(zip(described.parameters, values, strict=True))
        described.validate(arguments)
        implementation = described.resolve(arguments)
        untraceable = described.reads_values and implementation.forward is described.definition
        if implementation.differentiates_itself and not untraceable:
            return implementation.forward(*values)
        tensors = [arguments[name] for name in described.tensors]
        needs = [torch.is_grad_enabled() and value is not None and value.requires_grad for value in tensors]
        ahead = implementation.ahead_of(arguments) if any(needs) else None
        if ahead is not None and ahead.traced:
            return define_ahead(described, implementation.backend)(*values, needs)[0]
        return opaque(*values)

    return torch.compiler.allow_in_graph(traced)


class Gradient:
    """The operator `<name>_backward(arriving gradients, what is kept, needs) -> a gradient per tensor argument`.

    torch.library has no optional results, so a gradient nobody needs is an empty tensor on the way out.
    """

    def __init__(self, described: Operator):
        self.described = described
        self.kept = [name for name in described.parameters if name in described.saved or name not in described.tensors]
        self.kept_outputs = [name for name in described.outputs if name in described.saved]
        self.names = [*described.grads, *self.kept, *self.kept_outputs, "needs"]
        declared = declarations(described.schema)
        arguments = [
            *(f"Tensor {name}" for name in described.grads),
            *(declared[name] for name in self.kept),
            *(f"Tensor {name}" for name in self.kept_outputs),
            "bool[] needs",
        ]
        returns = ", ".join("Tensor" for _ in described.tensors)
        register(
            f"{described.name}_backward",
            f"({', '.join(arguments)}) -> " + (f"({returns})" if len(described.tensors) > 1 else returns),
            self.run,
            self.fake,
        )
        self.op = getattr(torch.ops.tilestack, f"{described.name}_backward")

    def run(self, *values: Any) -> Any:
        available = dict(zip(self.names, values, strict=True))
        device = available[self.described.grads[0]].device
        implementation = registry.resolve_backward(self.described, available, device)
        with torch.no_grad():
            if implementation is None:
                found = gradient_of_definition(self.described, available)
            else:
                found = as_tuple(call_named(implementation.own_backward, available))
        return self.results(found, available, values)

    def fake(self, *values: Any) -> Any:
        available = dict(zip(self.names, values, strict=True))
        if self.described.gradient is not None:
            found = as_tuple(call_named(self.described.gradient, available))
        else:
            found = tuple(
                None
                if available[name] is None
                else torch.empty_like(available[name], memory_format=torch.contiguous_format)
                for name in self.described.tensors
            )
        return self.results(found, available, values)

    def results(self, found: tuple, available: dict[str, Any], inputs: tuple) -> Any:
        taken: list[Tensor] = []
        for gradient, needed in zip(found, available["needs"], strict=True):
            wanted = gradient if needed and gradient is not None else available[self.described.grads[0]].new_empty(0)
            taken.append(fresh(wanted, (*inputs, *taken)))
        return tuple(taken) if len(taken) > 1 else taken[0]

    def setup_context(self, ctx: Any, inputs: tuple, output: Any) -> None:
        available = dict(zip(self.described.parameters, inputs, strict=True)) | dict(
            zip(self.described.outputs, as_tuple(output), strict=True)
        )
        kept = {name: available[name] for name in (*self.kept, *self.kept_outputs)}
        ctx.tensors = [name for name, value in kept.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(kept[name] for name in ctx.tensors))
        ctx.values = {name: value for name, value in kept.items() if name not in ctx.tensors}
        ctx.shapes = [None if available[name] is None else available[name].shape for name in self.described.tensors]

    def backward(self, ctx: Any, *arriving: Tensor) -> tuple:
        # The dispatcher leaves out trailing arguments that equal their defaults, and those need no gradient.
        given = dict(zip(self.described.parameters, ctx.needs_input_grad, strict=False))
        needs = [given.get(name, False) for name in self.described.tensors]
        kept = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.values
        available = dict(zip(self.described.grads, arriving, strict=True)) | kept | {"needs": needs}
        implementation = registry.resolve_backward(self.described, available, arriving[0].device)
        gradients: tuple[Tensor | None, ...]
        if implementation is not None and implementation.backward is self.described.gradient:
            # PyTorch's calls, which a compiler sees through: what is a view of `grad` stays one.
            gradients = gradient_of_definition(self.described, available)
        else:
            found = as_tuple(self.op(*(available[name] for name in self.names)))
            # An empty tensor stands in for a gradient that the formula leaves out.
            gradients = tuple(g if g.shape == shape else None for g, shape in zip(found, ctx.shapes, strict=True))
        return per_parameter(self.described, gradients, needs)


@functools.cache
def define_ahead(described: Operator, backend: str) -> Callable:
    """The operator `<name>_<backend>_ahead(arguments, needs) -> (result, a gradient per tensor argument)`."""
    name = f"{described.name}_{backend}_ahead"

    def results(out: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return out, *(out.new_empty(0) if gradient is None else gradient for gradient in gradients)

    def run(*values: Any) -> tuple[Tensor, ...]:
        *arguments, needs = values
        ahead = described.implementations[backend].ahead
        assert ahead is not None
        with torch.no_grad():
            return results(*ahead.forward(*arguments, needs=needs))

    def fake(*values: Any) -> tuple[Tensor, ...]:
        *arguments, needs = values
        tensors = [
            value for name, value in zip(described.parameters, arguments, strict=True) if name in described.tensors
        ]
        like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        made = [like(tensor) if needed else None for tensor, needed in zip(tensors, needs, strict=True)]
        return results(described.fake(*arguments), made)

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.needs = inputs[-1]
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple:
        return *per_parameter(described, tuple(made * grad for made in ctx.saved_tensors), ctx.needs), None

    arguments = declarations(torch.library.infer_schema(described.definition, mutates_args=())).values()
    returns = ", ".join(["Tensor"] * (1 + len(described.tensors)))
    register(name, f"({', '.join(arguments)}, bool[] needs) -> ({returns})", run, fake)
    torch.library.register_autograd(f"tilestack::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    return getattr(torch.ops.tilestack, name)


def register(name: str, schema: str, run: Callable, fake: Callable) -> None:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilestack::{name}", fake, lib=LIBRARY)


def fresh(out: Any, others: tuple) -> Any:
    """The results contiguous and sharing no memory with an input or one another, as torch.library demands."""
    if isinstance(out, tuple):
        taken: list[Tensor] = []
        for tensor in out:
            taken.append(fresh(tensor, (*others, *taken)))
        return tuple(taken)
    # Asked of the memory, for below autograd PyTorch does not note what is a view of what.
    shared = any(isinstance(other, Tensor) and memory_of(out) == memory_of(other) for other in others)
    return out.clone(memory_format=torch.contiguous_format) if shared else out.contiguous()


def memory_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def declarations(schema: str) -> dict[str, str]:
    """Each argument's declaration without its default, by name, of a schema such as `(Tensor x, float eps=1e-6) -> Tensor`."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    plain = [part.partition("=")[0].strip() for part in inside.split(", ")]
    return {declaration.split()[-1]: declaration for declaration in plain}
