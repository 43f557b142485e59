"""The registry: every operator by name, and the rule that picks an implementation for a call.

Kernels are loaded by name, the first time a backend is asked for, so that this package imports nothing above it.
"""

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext

from tilestack.contract.backends import AUTO, BackendError, chosen, usable

if TYPE_CHECKING:
    from tilestack.contract.implementation import Implementation
    from tilestack.contract.operator import Operator

_operators: dict[str, "Operator"] = {}
not_loaded: dict[str, str] = {}  # files of kernels that could not be imported here, and why

# No operators, but their steps run on kernels too, and a backend can be chosen for them: by name, since they lie above.
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw8bit", "clip_grad_norm")

# Asked by `auto` on CUDA for the fastest backends of a call, best first; the tuning tables answer once kernels load.
Preference = Callable[["Operator", dict[str, Any], torch.device], list[str]]
_preference: Preference | None = None


def add_operator(described: "Operator") -> None:
    if described.name in _operators:
        raise ValueError(
            f"an operator named {described.name} exists already, defined in {_operators[described.name].__module__}"
        )
    _operators[described.name] = described


def operators() -> list["Operator"]:
    """Every operator with all its backends."""
    load_kernels()
    return list(_operators.values())


def operator_named(name: str) -> "Operator":
    load_kernels()
    refuse_unknown_operator(name)
    if name in OPTIMIZERS:
        raise BackendError(f"{name} is an optimizer, not an operator; `tilestack bench optim` measures those")
    return _operators[name]


def refuse_unknown_operator(name: str) -> None:
    if name not in _operators and name not in OPTIMIZERS:
        close = difflib.get_close_matches(name, [*_operators, *OPTIMIZERS], n=1)
        raise BackendError(
            f"no operator is named {name!r}"
            + (f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(_operators))}")
        )


@functools.cache
def load_kernels() -> None:
    """Import the kernels, which register themselves; a missing Triton leaves the definitions."""
    try:
        importlib.import_module("tilestack.kernels")
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise


def set_preference(preference: Preference) -> None:
    global _preference
    _preference = preference


def forget_plans() -> None:
    """Make every operator choose again at its next call."""
    for described in _operators.values():
        described.plans.clear()


def resolve(
    described: "Operator", arguments: dict[str, Any], device: torch.device, with_gradient: bool
) -> "Implementation":
    """The implementation for a call: the chosen backend or an error that says why not; under `auto` the first that can."""
    load_kernels()
    name = chosen(described.name)
    if name == AUTO:
        for candidate in candidates(described, arguments, device):
            if not candidate.refuses(arguments, device, with_gradient):
                return candidate
        return described.implementations["torch"]
    if name not in described.implementations:
        hint = "" if usable(name, device) is True else f" ({usable(name, device)})"
        raise BackendError(
            f"{described.name} has no {name} backend{hint}; it has {', '.join(described.implementations)}"
        )
    implementation = described.implementations[name]
    if reason := implementation.refuses(arguments, device, with_gradient):
        others = [
            b for b, other in described.implementations.items() if not other.refuses(arguments, device, with_gradient)
        ]
        raise BackendError(
            f"{described.name} cannot run on {name}: {reason}; {', '.join(others) or 'no other backend'} can"
        )
    return implementation


def resolve_backward(described: "Operator", available: dict[str, Any], device: torch.device) -> "Implementation | None":
    """Where only what a gradient keeps is at hand: the implementation whose backward runs, None for the definition's."""
    load_kernels()
    name = chosen(described.name)
    options = candidates(described, available, device) if name == AUTO else [described.implementations[name]]
    return next(
        (option for option in options if callable(option.backward) and not option.refuses(available, device, True)),
        None,
    )


def candidates(described: "Operator", arguments: dict[str, Any], device: torch.device) -> list["Implementation"]:
    """What `auto` tries, in order: on CUDA the measured preference, then Triton; elsewhere the definition."""
    if device.type != "cuda":
        return [described.implementations["torch"]]
    preferred = _preference(described, arguments, device) if _preference else []
    known = [described.implementations[name] for name in (*preferred, "triton") if name in described.implementations]
    repeats, compiles = torch.are_deterministic_algorithms_enabled(), TracingContext.try_get() is not None
    return [way for way in known if (way.deterministic or not repeats) and (way.compiled or not compiles)]
