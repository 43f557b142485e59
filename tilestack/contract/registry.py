"""The registry: every operator by name, and the rule that picks an implementation for a call.

Kernels are loaded by name, the first time a backend is asked for, so that this package imports nothing above it.
"""

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilestack.contract.backends import AUTO, BackendError, Choice, chosen, usable, wants_invariance

if TYPE_CHECKING:
    from tilestack.contract.implementation import Implementation
    from tilestack.contract.operator import Operator

_operators: dict[str, "Operator"] = {}
not_loaded: dict[str, str] = {}  # files of kernels that could not be imported here, and why

# No operators, but their steps run on kernels too, and a backend can be chosen for them: by name, since they lie above.
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw8bit", "muon", "clip_grad_norm")

# Asked by `auto` for the fastest backends of a call, with a gradient or without, best first; the tuning tables
# answer once kernels load. `triton:tall` is the backend triton in its configuration `tall`.
Preference = Callable[["Operator", dict[str, Any], torch.device, bool], list[str]]
_preference: Preference | None = None


def add_operator(op: "Operator") -> None:
    if op.name in _operators:
        raise ValueError(f"an operator named {op.name} exists already, defined in {_operators[op.name].__module__}")
    _operators[op.name] = op


def remove_operator(op: "Operator") -> None:
    del _operators[op.name]


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


def refuse_unknown_backends(choice: str) -> None:
    """Refuse a choice that names a backend which no operator has, or not the operator it is for, before anything is called."""
    asked = Choice.parse(choice).checked()
    everywhere = {name for op in operators() for name in op.implementations} | {AUTO}
    for operator, name in (("", asked.default or AUTO), *asked.exceptions):
        known = {AUTO, *_operators[operator].implementations} if operator in _operators else everywhere
        backend = name.partition(":")[0]
        if backend not in known:
            close = difflib.get_close_matches(backend, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise BackendError(f"no backend{f' of {operator}' if operator else ''} is named {backend!r}; {hint}")


@functools.cache
def load_kernels() -> None:
    """Import the kernels, which register themselves; what cannot be imported here is in `not_loaded`."""
    importlib.import_module("tilestack.kernels")


def set_preference(preference: Preference) -> None:
    global _preference
    _preference = preference


def forget_plans() -> None:
    """Make every operator choose again at its next call."""
    for op in _operators.values():
        op.plans.clear()


def resolve(op: "Operator", arguments: dict[str, Any], device: torch.device, with_gradient: bool) -> "Implementation":
    """The implementation for a call: the chosen backend or an error that says why not; under `auto` the first that can."""
    load_kernels()
    name = chosen(op.name)
    if name == AUTO:
        for candidate in candidates(op, arguments, device, with_gradient):
            if not candidate.refuses(arguments, device, with_gradient):
                return candidate
        if wants_invariance() and (reason := op.implementations["torch"].refuses(arguments, device, with_gradient)):
            raise BackendError(f"{op.name} cannot run here: {reason}, nor is any other backend that can take the call")
        return op.implementations["torch"]
    name, _, config = name.partition(":")
    if name not in op.implementations:
        raise BackendError(
            f"{op.name} has no {name} backend{why_missing(name, device)}; it has {', '.join(op.implementations)}"
        )
    implementation = op.implementations[name]
    if config and config not in implementation.configs:
        there_are = f"it has {', '.join(implementation.configs)}" if implementation.configs else "it has none"
        raise BackendError(f"{op.name} on {name} has no configuration {config!r}; {there_are}")
    if reason := implementation.refuses(arguments, device, with_gradient):
        others = [b for b, other in op.implementations.items() if not other.refuses(arguments, device, with_gradient)]
        raise BackendError(f"{op.name} cannot run on {name}: {reason}; {', '.join(others) or 'no other backend'} can")
    return implementation


def why_missing(name: str, device: torch.device) -> str:
    """Why a backend that people know may be absent: what it needs, or files of it that this Triton cannot load."""
    reasons = [] if (needs := usable(name, device)) is True else [str(needs)]
    reasons += [f"{module} could not be loaded: {reason}" for module, reason in not_loaded.items()]
    return f" ({'; '.join(reasons)})" if reasons else ""


def configuration(
    implementation: "Implementation", arguments: dict[str, Any], choice: str = "", with_gradient: bool = True
) -> Any:
    """The launch configuration for a call: the one `choice` names, which is the choice in force where it is empty, else the
    one that measured fastest, else the implementation's first; None if it has none."""
    configs, op = implementation.configs, implementation.operator
    if not configs:
        return None
    if (config := config_in(choice or chosen(op.name), implementation.backend)) in configs:
        return configs[config]
    device = op.device_of(arguments)
    ranked = _preference(op, arguments, device, with_gradient) if _preference and device.type == "cuda" else []
    named = (config for name in ranked if (config := config_in(name, implementation.backend)) in configs)
    return configs[next(named, next(iter(configs)))]


def choice_made(implementation: "Implementation") -> str:
    """The implementation's backend, and its configuration where one was chosen by name: what a compiled graph keeps."""
    choice = chosen(implementation.operator.name)
    return choice if config_in(choice, implementation.backend) else implementation.backend


def config_in(ranked: str, backend: str) -> str:
    """The configuration that a ranking such as `triton:tall` names for a backend; empty where it names none."""
    name, _, config = ranked.partition(":")
    return config if name == backend else ""


def resolve_backward(op: "Operator", available: dict[str, Any], device: torch.device) -> "Implementation | None":
    """Where only what a gradient keeps is at hand: the implementation whose backward runs, None for the definition's."""
    load_kernels()
    name = chosen(op.name)
    options = candidates(op, available, device, True) if name == AUTO else [op.implementations[name.partition(":")[0]]]
    return next(
        (option for option in options if callable(option.backward) and not option.refuses(available, device, True)),
        None,
    )


def candidates(
    op: "Operator", arguments: dict[str, Any], device: torch.device, with_gradient: bool
) -> list["Implementation"]:
    """What `auto` tries, in order: the measured preference, then on CUDA Triton; `resolve` ends with the definition."""
    if device.type not in ("cuda", "cpu"):
        return []
    ranked = _preference(op, arguments, device, with_gradient) if _preference else []
    names = [*(name.partition(":")[0] for name in ranked), *(["triton"] if device.type == "cuda" else [])]
    known = [op.implementations[name] for name in dict.fromkeys(names) if name in op.implementations]
    repeats = torch.are_deterministic_algorithms_enabled()
    return [way for way in known if way.deterministic or not repeats]
