"""The plan of a signature: made by its first call, which checks the arguments and resolves a backend; run by all that follow.

Plans that were not used lately are forgotten, so that ever-changing shapes stay bounded.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack.contract import registry
from tilestack.contract.backends import checks_values
from tilestack.contract.named import answer_of

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator

PLANS_KEPT = 4096  # signatures of an operator, and as many again that were used before them


class Plans:
    """Functions by signature, in two generations: when the recent one is full it becomes the older one, and what was not
    used since is forgotten."""

    def __init__(self) -> None:
        self.recent: dict[Any, Callable] = {}
        self.older: dict[Any, Callable] = {}

    def find(self, key: Any) -> Callable | None:
        """The plan of a signature, which then counts as recent."""
        plan = self.recent.get(key)
        if plan is None and (plan := self.older.pop(key, None)) is not None:
            self.keep(key, plan)
        return plan

    def keep(self, key: Any, plan: Callable) -> None:
        if len(self.recent) >= PLANS_KEPT:
            self.older = dict(self.recent)
            self.recent.clear()  # the same dictionary, which the operator's `__call__` looks into
        self.recent[key] = plan

    def replace(self, key: Any, plan: Callable, faster: Callable) -> None:
        """Put a faster function in the place of a plan, unless it was forgotten since."""
        for generation in (self.recent, self.older):
            if generation.get(key) is plan:
                generation[key] = faster

    def forget(self, key: Any) -> None:
        self.recent.pop(key, None)
        self.older.pop(key, None)

    def clear(self) -> None:
        self.recent.clear()
        self.older.clear()

    def __len__(self) -> int:
        return len(self.recent) + len(self.older)


def plan(op: "Operator", key: tuple | None, values: tuple) -> Callable:
    """What runs this call, and with a key, kept, the calls of its signature: checked and resolved."""
    if key is not None and (known := op.plans.find(key)) is not None:
        return known
    arguments = dict(zip(op.parameters, values, strict=True))
    op.validate(arguments)
    given = op.given_tensors(arguments)
    if any(tensor.is_neg() for tensor in given.values()):
        return functools.partial(without_negated_views, op)
    if (lowering := op.under_autocast(arguments)) is not None:
        if key is not None:
            op.plans.keep(key, lowering)
        return lowering
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.values())
    implementation = resolve(op, arguments, with_gradient)
    if forward_ad._current_level >= 0:
        refuse_tangents(implementation, given)
        key = None  # whether a tensor has a tangent is no part of a signature
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(implementation)
    run = make_plan(op, implementation, arguments, given, with_gradient, key)
    if op.check_values is not None and checks_values(op.device_of(arguments)):
        run = functools.partial(check_values_and_run, op, run)
    if key is not None:
        op.plans.keep(key, run)
    return functools.partial(first_call, op, implementation, key, run, list(given.items()))


def resolve(op: "Operator", arguments: dict[str, Any], with_gradient: bool) -> Any:
    """The implementation of a call, unless a gradient is wanted that nobody has."""
    if op.mutates and with_gradient:
        raise RuntimeError(
            f"{op.name} writes into {', '.join(op.mutates)} and has no gradient; call it under torch.no_grad()"
        )
    implementation = op.resolve(arguments, with_gradient)
    if op.lists and with_gradient and not implementation.differentiates_itself:
        raise NotImplementedError(f"{op.name} takes a list of tensors, for which only AUTOGRAD makes gradients")
    return implementation


def make_plan(
    op: "Operator",
    implementation: Any,
    arguments: dict[str, Any],
    given: dict[str, Tensor],
    with_gradient: bool,
    key: tuple | None,
) -> Callable:
    """The function for one signature."""
    if not all(map(has_memory, given.values())) or (op.reads_values and any(t.is_meta for t in given.values())):
        return op.traced  # fake tensors and others without memory have their own way with an operator
    config = registry.configuration(implementation, arguments, with_gradient=with_gradient)
    forward = implementation.forward if config is None else functools.partial(implementation.forward, config=config)
    if with_gradient and not implementation.differentiates_itself:
        from tilestack.contract.autograd import differentiable

        return differentiable(implementation, implementation.extras_of(arguments), forward, config)
    if implementation.repeat is None or key is None:
        return bumping(op, forward)
    run: Callable = bumping(
        op, implementation.repeat(forward, lambda faster: op.plans.replace(key, run, bumping(op, faster)))
    )
    return run


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is what a kernel takes it for; not so a fake one, nor a class with its own way of dispatching."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def check_values_and_run(op: "Operator", run: Callable, *values: Any) -> Any:
    arguments = dict(zip(op.parameters, values, strict=True))
    if op.check_values is not None and (reason := answer_of(op.check_values, arguments)) is not True:
        raise IndexError(f"{op.name}: {reason}")
    return run(*values)


def bumping(op: "Operator", run: Callable) -> Callable:
    """The function, telling autograd of the arguments it has written."""
    if not op.mutates:
        return run
    places = [op.parameters.index(name) for name in op.mutates]

    def run_and_tell(*values: Any) -> Any:
        out = run(*values)
        for place in places:
            if values[place] is not None:
                torch.autograd.graph.increment_version(values[place])
        return out

    return run_and_tell


def first_call(
    op: "Operator",
    implementation: Any,
    key: tuple | None,
    run: Callable,
    given: Sequence[tuple[str, Tensor]],
    *values: Any,
) -> Any:
    """Run the first call of a signature, and forget its plan if it breaks what the operator promises."""
    before = [(name, tensor, tensor._version) for name, tensor in given if not tensor.is_inference()]
    out = run(*values)
    if broken := broken_promise(op, before, out):
        op.plans.forget(key)
        raise RuntimeError(f"{op.name} on {implementation.backend} {broken}")
    return out


def broken_promise(op: "Operator", before: Sequence[tuple[str, Tensor, int]], out: Any) -> str:
    """What a call has done that its operator does not declare; empty where all is well."""
    written = [tensor for name, tensor, _ in before if name.partition("[")[0] in (*op.mutates, *op.consumes)]
    for name, tensor, version in before:
        # What lies in the memory of an argument that is written shares its version.
        if tensor._version != version and not any(same_memory(tensor, other) for other in written):
            return f"has written into {name}; an operator that does declares it: @operator(mutates=({name!r},))"
    results = 0 if out is None else len(out) if isinstance(out, list | tuple) else 1
    if results != len(op.outputs):
        declared = f"{len(op.outputs)} ({', '.join(op.outputs)})" if op.outputs else "none"
        return (
            f"has returned {results} results where the operator declares {declared}; return those, or declare outputs"
        )
    return ""


def same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def without_negated_views(op: "Operator", *values: Any) -> Any:
    """Kernels read memory, and a negated view's memory has the other sign."""
    given = op.given_tensors(dict(zip(op.parameters, values, strict=True)))
    if written := [name for name, t in given.items() if t.is_neg() and name.partition("[")[0] in op.mutates]:
        raise ValueError(f"{op.name} writes into {', '.join(written)}, which cannot be a negated view")
    resolve = lambda value: value.resolve_neg() if isinstance(value, Tensor) else value
    return op(
        *([resolve(item) for item in value] if isinstance(value, list | tuple) else resolve(value) for value in values)
    )


def refuse_tangents(implementation: Any, given: dict[str, Tensor]) -> None:
    """Forward-mode derivatives exist where PyTorch makes them; a kernel would drop them silently."""
    if not implementation.differentiates_itself and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in given.values()
    ):
        op = implementation.operator
        raise NotImplementedError(
            f"{op.name} has no forward-mode derivative on {implementation.backend}; run it `with "
            f"tilestack.backend({op.name}='torch')` to differentiate forward"
        )


def refuse_transforms(implementation: Any) -> None:
    """Inside vmap, grad and their like even what a kernel allocates is a tensor without memory."""
    if not implementation.differentiates_itself:
        op = implementation.operator
        raise NotImplementedError(
            f"{op.name} cannot be transformed by torch.func on {implementation.backend}; run it `with "
            f"tilestack.backend({op.name}='torch')` inside vmap, grad and their like"
        )
