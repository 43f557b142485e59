"""A call: its signature, and the plan that runs every call of that signature.

A signature is all that a choice of implementation may depend on: the chosen backend, whether bits are to repeat, what
autocast wants, whether a gradient is wanted, each tensor's class, shape, strides, dtype and device, and the value of every
other argument. The first call of a signature checks the arguments, resolves a backend and makes a plan; the next ones find
it in a dictionary. What concerns the tensors is made in C++ where that is built (native/signature.h), in Python for the rare
ones and elsewhere. Plans that were not used lately are forgotten, so that ever-changing shapes stay bounded.
"""

import functools
import operator as numbers
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack.contract import registry
from tilestack.contract.backends import checks_values, entered
from tilestack.contract.named import answer_of
from tilestack.contract.native.build import native_node
from tilestack.contract.source import lines, write_function

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator

PLANS_KEPT = 4096  # signatures of an operator, and as many again that were used before them
WARM_UP_CALLS = 3  # the first compiles, the second is noted, the third is repeated


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


def write_call(op: "Operator") -> Callable:
    """The `__call__` of one operator, so that a call costs its signature and one dictionary look-up."""
    parts, grads, views, coerced, options = [], [], [], [], []
    for name in op.parameters:
        annotation = op.annotations[name]
        of_tensor = f"{name}.__class__, {name}.shape, {name}.stride(), {name}.dtype, {name}.device"
        if name in op.optional:
            parts.append(f"None if {name} is None else ({of_tensor})")
            grads.append(f"{name} is not None and {name}.requires_grad")
            views.append(f"{name} is not None and {name}.is_neg()")
        elif name in op.tensors:
            parts.append(of_tensor)
            grads.append(f"{name}.requires_grad")
            views.append(f"{name}.is_neg()")
        elif name in op.lists:
            parts.append(f"tuple([(_x.__class__, _x.shape, _x.stride(), _x.dtype, _x.device) for _x in {name}])")
            grads.append(f"any([_x.requires_grad for _x in {name}])")
            views.append(f"any([_x.is_neg() for _x in {name}])")
        else:
            if plain := NUMBERS.get(annotation):
                given = f"{name} is not None and " if annotation in OPTIONAL_NUMBERS else ""
                coerced.append(
                    f"if {given}{name}.__class__ is not {plain}: {name} = _{plain}({name}, {op.name!r}, {name!r})"
                )
            options.append(f"tuple({name})" if typing.get_origin(annotation) in (list, Sequence) else name)
    names = ", ".join(op.parameters)
    tensors = ", ".join(name for name in op.parameters if name in (*op.tensors, *op.optional, *op.lists))
    declared = ", ".join(
        name if p.default is p.empty else f"{name}={name}_default" for name, p in op.signature.parameters.items()
    )
    # Underscores keep these names apart from the operator's arguments, which may well be called `key` or `plan`.
    text = f"""
def __call__(self, {declared}, *, out=None):
    if _compiling():
        return _traced({names}) if out is None else _copied(out, _traced({names}))
{lines(*coerced)}
    try:
        _seen = _signature and _signature({tensors}) or (
            _deterministic(), _autocasting() and _autocast(), _transforming(), {" or ".join(views)},
            _grad_enabled() and ({" or ".join(grads)}), {", ".join(parts)},
        )
        _key = _entered(), _forward_ad._current_level, _seen, {", ".join(options)}
        _run = _plans.get(_key)
    except (AttributeError, TypeError):  # no tensor where one belongs, or an argument without a hash
        _key = _run = None
    if out is not None:
        return _into(_op, out, _key, ({names},))
    if _run is None:
        _run = _plan(_op, _key, ({names},))
    return _run({names})
"""
    scope: dict[str, Any] = {f"{name}_default": p.default for name, p in op.signature.parameters.items()}
    scope |= dict(
        _op=op,
        _signature=functools.partial(first_signature, op),
        _compiling=torch.compiler.is_compiling,
        _traced=op.traced,
        _copied=copied,
        _grad_enabled=torch.is_grad_enabled,
        _entered=entered,
        _forward_ad=forward_ad,
        _autocasting=torch._C._is_any_autocast_enabled,
        _autocast=autocast,
        _transforming=torch._C._are_functorch_transforms_active,
        _deterministic=torch._C._get_deterministic_algorithms,
        _plans=op.plans.recent,
        _plan=plan,
        _into=into,
        _float=as_float,
        _int=as_int,
        _bool=as_bool,
    )
    call = write_function("__call__", text, scope)
    call.__doc__ = op.definition.__doc__
    return call


def first_signature(op: "Operator", *tensors: Any) -> bytes | None:
    """What an operator's first call knows of its tensors; the next ones ask C++ themselves, where that is built."""
    native: Any = native_node()
    signature = type(op).__call__.__globals__["_signature"] = native and native.signature  # type: ignore[attr-defined]
    return signature and signature(*tensors)


def autocast() -> tuple:
    """The dtypes that products are lowered to, where they are."""
    return tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda"))


OPTIONAL_NUMBERS = (float | None, int | None, bool | None)
NUMBERS = {float: "float", int: "int", bool: "bool"} | dict(
    zip(OPTIONAL_NUMBERS, ("float", "int", "bool"), strict=True)
)


def as_float(value: Any, op: str, name: str) -> Any:
    """A number where a float belongs, so that 2, True and numpy's 2.0 are the one float they stand for."""
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        raise TypeError(f"{op}: {name} must be a number, not {type(value).__name__}")
    return value if isinstance(value, torch.SymFloat) else float(value)


def as_int(value: Any, op: str, name: str) -> Any:
    if isinstance(value, Tensor) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {name} must be a whole number, not {type(value).__name__}")
    return value if isinstance(value, torch.SymInt) else numbers.index(value)


def as_bool(value: Any, op: str, name: str) -> Any:
    if isinstance(value, Tensor) or not hasattr(value, "__bool__"):
        raise TypeError(f"{op}: {name} must be True or False, not {type(value).__name__}")
    return value if isinstance(value, torch.SymBool) else bool(value)


def plan(op: "Operator", key: tuple | None, values: tuple) -> Callable:
    """What runs this call, and with a key, kept, the calls of its signature: checked and resolved."""
    if key is not None and (known := op.plans.find(key)) is not None:
        return known
    arguments = dict(zip(op.parameters, values, strict=True))
    op.validate(arguments)
    given = op.given_tensors(arguments)
    if any(tensor.is_neg() for tensor in given.values()):
        return functools.partial(without_negated_views, op)
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


def into(op: "Operator", out: Any, key: tuple | None, values: tuple) -> Any:
    """A call whose results go into given memory: written there by a repeated call, copied there by any other."""
    arguments = dict(zip(op.parameters, values, strict=True))
    places = out if isinstance(out, list | tuple) else (out,)
    if len(places) != len(op.outputs) or not all(isinstance(place, Tensor) for place in places):
        raise TypeError(
            f"{op.name}: out must be {'a tensor' if len(op.outputs) == 1 else f'{len(op.outputs)} tensors'}"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*op.given_tensors(arguments).values(), *places)):
        raise RuntimeError(f"{op.name}: out= has no gradient; call it under torch.no_grad()")
    if key is not None:
        key = ("into", key, *((p.shape, p.stride(), p.dtype, p.device, p.is_neg()) for p in places))
    run = op.plans.find(key) if key is not None else None
    if run is None:
        run = plan_into(op, key, arguments, places)
    run(*places, *values)
    return out


def plan_into(op: "Operator", key: tuple | None, arguments: dict[str, Any], places: Sequence[Tensor]) -> Callable:
    """A function of the given places, then the arguments."""
    count = len(op.outputs)
    op.validate(arguments)
    given = op.given_tensors(arguments).values()
    checked = op.check_values is not None and checks_values(op.device_of(arguments))
    transforming = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if checked or transforming or any(t.is_neg() or not has_memory(t) for t in (*given, *places)):
        return lambda *values: copied(values[:count], op(*values[count:]), op.name)
    implementation = op.resolve(arguments)
    config = registry.configuration(implementation, arguments)
    forward = implementation.forward if config is None else functools.partial(implementation.forward, config=config)

    def run_and_copy(*values: Any) -> None:
        with torch.no_grad():
            found = forward(*values[count:])
        copied(values[:count], found, op.name)

    run = run_and_copy
    if implementation.repeat and key is not None:
        keep = lambda faster: op.plans.replace(key, run, bumping_into(op, faster))
        run = implementation.repeat(forward, keep, places=count, otherwise=run_and_copy)
    run = bumping_into(op, run)
    if key is not None:
        op.plans.keep(key, run)
    return run


def bumping_into(op: "Operator", run: Callable) -> Callable:
    """The function, telling autograd of the places it has written, and of the arguments that are written besides."""
    count = len(op.outputs)
    also = [count + op.parameters.index(name) for name in op.mutates]

    def run_and_tell(*values: Any) -> None:
        run(*values)
        torch.autograd.graph.increment_version(values[:count])
        for place in also:
            if values[place] is not None:
                torch.autograd.graph.increment_version(values[place])

    return run_and_tell


def copied(out: Any, found: Any, name: str = "out") -> Any:
    """The results, copied to the places given for them."""
    places = out if isinstance(out, list | tuple) else (out,)
    results = found if isinstance(found, list | tuple) else (found,)
    for place, result in zip(places, results, strict=True):
        if (place.shape, place.dtype, place.device) != (result.shape, result.dtype, result.device):
            raise ValueError(
                f"{name}: out is {place.dtype} {tuple(place.shape)} on {place.device}, "
                f"but the result is {result.dtype} {tuple(result.shape)} on {result.device}"
            )
        place.copy_(result)
    return out


def warm_up(op: "Operator", arguments: dict[str, Any]) -> None:
    """Call an operator, and its gradient where one is wanted, until nothing about the signature is new."""
    for _ in range(WARM_UP_CALLS):
        copies = {
            name: clones_of(value) if name in (*op.mutates, *op.consumes) else value
            for name, value in arguments.items()
        }
        found = op(*copies.values())
        results = [
            r for r in (found if isinstance(found, tuple) else (found,)) if isinstance(r, Tensor) and r.requires_grad
        ]
        wanted = [t for t in op.given_tensors(copies).values() if t.requires_grad]
        if results:
            torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)


def clones_of(value: Any) -> Any:
    """A tensor, a list of them or None, to be written in place of the given one."""
    if isinstance(value, list | tuple):
        return [tensor.clone() for tensor in value]
    return None if value is None else value.clone()
