"""What torch.compile, export and opcheck see: every operator as `torch.ops.tilestack.<name>`, with its gradient.

Under a compiler the backend is chosen while tracing, and kept: for the forward, its gradient, and what is computed again
in the backward. A backend made of PyTorch calls is traced through, so that the compiler can fuse it, unless it reads
values; any other becomes one opaque operator,

    <name>(arguments, *, backend)                   the fake is the definition on fake tensors, or the `fake` declared
    <name>_backward(arriving, kept, needs, *, backend)
    <name>_with_extras(arguments, needs, *, backend), <name>_with_extras_backward(arriving, kept, extras, needs, *, backend)

the last two where an implementation hands extras to its backward and says what they look like. Where a backward is the
operator's own `gradient`, that formula is traced through. Results of all of them are contiguous, as the fakes promise.
An empty backend means: resolved when it runs, as any call.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract import registry
from tilestack.contract.autograd import gradient_of_definition, per_parameter
from tilestack.contract.backends import BackendError
from tilestack.contract.backends import backend as on_backend
from tilestack.contract.implementation import Extras, Implementation
from tilestack.contract.named import call_named, parameters_of
from tilestack.contract.operator import Operator, as_tuple
from tilestack.contract.plan import resolve

LIBRARY = torch.library.Library("tilestack", "DEF")
COMPILER = "torch._dynamo"


def define(op: Operator) -> Callable:
    """Register an operator and its gradient with torch.library; returns what a compiler traces for a call."""

    def run(*values: Any, backend: str = "") -> Any:
        with torch.no_grad(), on_backend(**({op.name: backend} if backend else {})):
            return fresh(op(*values), values)

    def fake(*values: Any, backend: str = "") -> Any:
        with Writes() as writes:
            out = fresh(op.fake(*values), values)
        for name, value in zip(op.parameters, values, strict=False):
            if isinstance(value, Tensor) and memory_of(value) in writes.memories and name not in op.mutates:
                raise RuntimeError(f"{op.name} writes into {name}; declare it: @operator(mutates=({name!r},))")
        return out

    register(op.name, with_backend(schema_of(op)), run, fake)
    opaque = getattr(torch.ops.tilestack, op.name)
    if op.outputs and not op.mutates and not op.lists:
        gradient = Gradient(op)
        torch.library.register_autograd(
            f"tilestack::{op.name}", gradient.backward, setup_context=gradient.setup_context, lib=LIBRARY
        )

    def traced(*values: Any) -> Any:
        arguments = dict(zip(op.parameters, values, strict=True))
        op.validate(arguments)
        if (lowering := op.under_autocast(arguments)) is not None:
            return lowering(*values)
        given = op.given_tensors(arguments)
        with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in given.values())
        implementation = resolve(op, arguments, with_gradient)
        untraceable = op.reads_values and implementation.forward is op.definition
        if implementation.differentiates_itself and not untraceable:
            return implementation.forward(*values)
        extras = implementation.extras_of(arguments) if with_gradient else None
        if extras is not None and extras.fake is not None:
            needs = [isinstance(arguments[name], Tensor) and arguments[name].requires_grad for name in op.tensors]
            run_with_extras = define_with_extras(op, implementation.backend, extras)
            found = run_with_extras(*values, needs, backend=registry.choice_made(implementation))
            return found[0] if len(op.outputs) == 1 else tuple(found[: len(op.outputs)])
        return opaque(*values, backend=registry.choice_made(implementation))

    return allowed_in_graphs(traced)


def allowed_in_graphs(function: Callable) -> Callable:
    """Let a compiler put calls of a function into its graphs as they are; without importing the compiler for it."""
    if COMPILER in sys.modules:
        return torch.compiler.allow_in_graph(function)
    if not _waiting:
        sys.meta_path.insert(0, _OnceCompilerLoads())
    _waiting.append(function)
    return function


_waiting: list[Callable] = []


class _OnceCompilerLoads(MetaPathFinder):
    """Sees PyTorch's compiler being imported, a second's work that most programs never ask for."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: Any) -> None:
                load(module)
                while _waiting:
                    torch.compiler.allow_in_graph(_waiting.pop())

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


def schema_of(op: Operator, defaults: bool = True) -> str:
    """`(Tensor x, float eps=1e-6) -> Tensor`, from the definition's annotations."""
    if defaults:
        try:
            return torch.library.infer_schema(op.definition, mutates_args=op.mutates)
        except ValueError:  # a default that schemas have no words for, such as a list
            pass

    def bare() -> None: ...

    plain = [p.replace(default=p.empty) for p in op.signature.parameters.values()]
    bare.__signature__ = op.signature.replace(parameters=plain)  # type: ignore[attr-defined]
    bare.__annotations__ = op.definition.__annotations__
    return torch.library.infer_schema(bare, mutates_args=op.mutates)


def with_backend(schema: str) -> str:
    arguments, arrow, returns = schema.rpartition(") -> ")
    return f'{arguments}, *, str backend=""{arrow}{returns}'


def declarations(op: Operator) -> dict[str, str]:
    """Each argument's declaration without its default, by name."""
    schema = schema_of(op, defaults=False)
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return {declaration.split()[-1]: declaration for declaration in inside.split(", ")}


class Gradient:
    """The operator `<name>_backward(arriving gradients, what is kept, needs) -> a gradient per tensor argument`.

    torch.library has no optional results, so a gradient nobody needs is an empty tensor on the way out.
    """

    def __init__(self, op: Operator, extras: Extras | None = None, name: str = ""):
        self.op, self.extras = op, extras
        self.name = name or f"{op.name}_backward"
        self.handed = extras.names(op) if extras else []
        saved = parameters_of(extras.backward) if extras else op.saved
        self.kept = [name for name in op.parameters if name in saved or name not in op.tensors]
        self.kept_outputs = [name for name in op.outputs if name in saved]
        # Of what is not kept, the shape of a gradient must still be known.
        self.likes = {name: f"{name}_like" for name in op.tensors if extras and name not in self.kept}
        self.names = [*op.grads, *self.kept, *self.kept_outputs, *self.handed, *self.likes.values(), "needs"]
        declared = declarations(op)
        arguments = [
            *(f"Tensor {name}" for name in op.grads),
            *(declared[name] for name in self.kept),
            *(f"Tensor {name}" for name in (*self.kept_outputs, *self.handed)),
            *(f"Tensor? {name}" for name in self.likes.values()),
            "bool[] needs",
        ]
        returns = ", ".join("Tensor" for _ in op.tensors)
        schema = f"({', '.join(arguments)}) -> " + (f"({returns})" if len(op.tensors) > 1 else returns)
        register(self.name, with_backend(schema), self.run, self.fake)
        self.call = getattr(torch.ops.tilestack, self.name)

    def run(self, *values: Any, backend: str = "") -> Any:
        available = dict(zip(self.names, values, strict=True))
        implementation = self.implementation(available, backend)
        config = {"config": implementation and registry.configuration(implementation, available, backend)}
        with torch.no_grad():
            if self.extras is not None:
                handed = {name: given_back(available[name], name in self.extras.overwrites) for name in self.handed}
                found = as_tuple(call_named(self.extras.backward, available | handed | config))
            elif implementation is None:
                found = gradient_of_definition(self.op, available)
            else:
                found = as_tuple(call_named(implementation.own_backward, available | config))
        return self.results(found, available, values)

    def implementation(self, available: dict[str, Any], backend: str) -> Implementation | None:
        """Whose backward runs: the forward's, or where no forward says, the one that is resolved now."""
        if not backend:
            return registry.resolve_backward(self.op, available, available[self.op.grads[0]].device)
        chosen = self.op.implementations.get(backend.partition(":")[0])
        if chosen is None:
            raise BackendError(f"{self.op.name} was compiled on {backend}, a backend that is not registered now")
        return chosen if callable(chosen.backward) else None

    def fake(self, *values: Any, backend: str = "") -> Any:
        available = dict(zip(self.names, values, strict=True))
        if self.op.gradient is not None and self.extras is None:
            found = as_tuple(call_named(self.op.gradient, available))
        else:
            like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
            arguments = {name: available[self.likes.get(name, name)] for name in self.op.parameters}
            left_out = self.left_out(arguments, available)
            models = [None if name in left_out else arguments[name] for name in self.op.tensors]
            found = tuple(None if model is None else like(model) for model in models)
        return self.results(found, available, values)

    def left_out(self, arguments: dict[str, Any], available: dict[str, Any]) -> set[str]:
        """Those for which the declared formula has no gradient, so that no implementation makes one either."""
        if self.op.gradient is None:
            return set()
        outputs = dict(zip(self.op.outputs, as_tuple(self.op.fake(*arguments.values())), strict=True))
        found = as_tuple(call_named(self.op.gradient, available | arguments | outputs))
        return {name for name, gradient in zip(self.op.tensors, found, strict=True) if gradient is None}

    def results(self, found: tuple, available: dict[str, Any], inputs: tuple) -> Any:
        taken: list[Tensor] = []
        for gradient, needed in zip(found, available["needs"], strict=True):
            wanted = gradient if needed and gradient is not None else available[self.op.grads[0]].new_empty(0)
            taken.append(fresh(wanted, (*inputs, *taken)))
        return tuple(taken) if len(taken) > 1 else taken[0]

    def setup_context(self, ctx: Any, inputs: tuple, keyword_only_inputs: dict[str, Any], output: Any) -> None:
        outputs = as_tuple(output)
        available = dict(zip(self.op.parameters, inputs, strict=False))
        available |= dict(zip((*self.op.outputs, *self.handed), outputs, strict=True))
        available |= {like: shape_alone(available[name]) for name, like in self.likes.items()}
        kept = {name: available[name] for name in (*self.kept, *self.kept_outputs, *self.handed, *self.likes.values())}
        ctx.tensors = [name for name, value in kept.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(kept[name] for name in ctx.tensors))
        ctx.values = {name: value for name, value in kept.items() if name not in ctx.tensors}
        ctx.shapes = [None if available[name] is None else available[name].shape for name in self.op.tensors]
        ctx.backend = keyword_only_inputs["backend"]

    def backward(self, ctx: Any, *arriving: Tensor) -> tuple:
        # The dispatcher leaves out trailing arguments that equal their defaults, and those need no gradient.
        given = dict(zip(self.op.parameters, ctx.needs_input_grad, strict=False))
        needs = [given.get(name, False) for name in self.op.tensors]
        kept = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.values
        arriving = arriving[: len(self.op.grads)]
        available = dict(zip(self.op.grads, arriving, strict=True)) | kept | {"needs": needs}
        implementation = None if self.extras else self.implementation(available, ctx.backend)
        gradients: tuple[Tensor | None, ...]
        if implementation is not None and implementation.backward is self.op.gradient:
            # PyTorch's calls, which a compiler sees through: what is a view of `grad` stays one.
            gradients = gradient_of_definition(self.op, available)
        else:
            found = as_tuple(self.call(*(available[name] for name in self.names), backend=ctx.backend))
            # An empty tensor stands in for a gradient that the formula leaves out.
            gradients = tuple(g if g.shape == shape else None for g, shape in zip(found, ctx.shapes, strict=True))
        return per_parameter(self.op, gradients, needs)


@functools.cache
def define_with_extras(op: Operator, backend: str, extras: Extras) -> Callable:
    """`<name>_with_extras_<backend>(arguments, needs) -> (results, extras)` and the gradient that takes them."""
    name = f"{op.name}_with_extras_{backend}"
    if hasattr(torch.ops.tilestack, name):  # of a backend that was registered anew; PyTorch keeps names for good
        name = f"{name}_{id(extras)}"
    assert extras.fake is not None
    imagine = extras.fake

    def results(out: Any, handed: Sequence[Tensor | None], values: tuple) -> tuple[Tensor, ...]:
        made = as_tuple(out)
        return fresh((*made, *(made[0].new_empty(0) if extra is None else extra for extra in handed)), values)

    def run(*values: Any, backend: str = backend) -> tuple[Tensor, ...]:
        *arguments, needs = values
        named = dict(zip(op.parameters, arguments, strict=True))
        also = {
            "needs": needs,
            "config": registry.configuration(op.implementations[backend.partition(":")[0]], named, backend),
        }
        with torch.no_grad():
            made = extras.forward(*arguments, **{k: v for k, v in also.items() if k in parameters_of(extras.forward)})
        out, *handed = made if gradient.handed else (made,)
        return results(out, handed, values)

    def fake(*values: Any, backend: str = backend) -> tuple[Tensor, ...]:
        available = dict(zip((*op.parameters, "needs"), values, strict=True))
        return results(op.fake(*values[:-1]), as_tuple(call_named(imagine, available)), values)

    gradient = Gradient(op, extras, f"{name}_backward")
    arguments = declarations(op).values()
    returns = ", ".join(["Tensor"] * (len(op.outputs) + len(gradient.handed)))
    register(name, f'({", ".join(arguments)}, bool[] needs, *, str backend="{backend}") -> ({returns})', run, fake)

    def backward(ctx: Any, *arriving: Tensor) -> tuple:
        return *gradient.backward(ctx, *arriving), None

    torch.library.register_autograd(f"tilestack::{name}", backward, setup_context=gradient.setup_context, lib=LIBRARY)
    if op.autocast_entry is not None:
        op.autocast_entry(name)
    return getattr(torch.ops.tilestack, name)


def given_back(extra: Tensor, overwritten: bool) -> Tensor | None:
    """An extra as the forward made it: an empty tensor stood in for None, and one that is written over is a copy."""
    if extra.shape == (0,):
        return None
    return extra.clone() if overwritten else extra


def shape_alone(x: Tensor | None) -> Tensor | None:
    """A tensor of the same shape and dtype that is one element of memory."""
    return None if x is None else x.new_empty(()).expand(x.shape)


def register(name: str, schema: str, run: Callable, fake: Callable) -> None:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilestack::{name}", fake, lib=LIBRARY)


def fresh(out: Any, others: Sequence) -> Any:
    """The results contiguous and sharing no memory with an input or one another, as torch.library demands."""
    if out is None:
        return None
    if isinstance(out, tuple):
        taken: list[Tensor] = []
        for tensor in out:
            taken.append(fresh(tensor, (*others, *taken)))
        return tuple(taken)
    # Asked of the memory, for below autograd PyTorch does not note what is a view of what.
    shared = any(isinstance(other, Tensor) and memory_of(out) == memory_of(other) for other in others)
    return out.clone(memory_format=torch.contiguous_format) if shared else out.contiguous()


class Writes(TorchDispatchMode):
    """Sees whose memory PyTorch's functions write, where no version counter is kept: below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, declared in zip(args, func._schema.arguments, strict=False):
            if isinstance(argument, Tensor) and declared.alias_info is not None and declared.alias_info.is_write:
                self.memories.add(memory_of(argument))
        return func(*args, **(kwargs or {}))


def memory_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata
