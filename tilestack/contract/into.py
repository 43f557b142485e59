"""Results into given memory, `op(…, out=…)`: written there by a repeated call, copied there by any other."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack.contract import registry
from tilestack.contract.backends import checks_values
from tilestack.contract.plan import has_memory

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator


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
    otherwise = checked or transforming or op.under_autocast(arguments) is not None
    if otherwise or any(t.is_neg() or not has_memory(t) for t in (*given, *places)):
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
