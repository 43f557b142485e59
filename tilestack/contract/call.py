"""A call: its signature, by which the plan is found that runs every call of that signature.

A signature is all that a choice of implementation may depend on: the chosen backend, whether bits are to repeat, what
autocast wants, whether a gradient is wanted, each tensor's class, shape, strides, dtype and device, and the value of every
other argument. The first call of a signature makes a plan (plan.py); the next ones find it in a dictionary. What concerns
the tensors is made in C++ where that is built (native/signature.h), in Python for the rare ones and elsewhere.
"""

import functools
import operator as numbers
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack.contract.backends import entered
from tilestack.contract.into import copied, into
from tilestack.contract.native.build import native_node
from tilestack.contract.plan import plan
from tilestack.contract.source import lines, write_function

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator

WARM_UP_CALLS = 3  # the first compiles, the second is noted, the third is repeated


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
