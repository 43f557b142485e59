"""Functions around an operator name what they look at, and get just that."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Reason = bool | str  # True, or why not


@functools.lru_cache(maxsize=4096)  # a call of a new signature asks several times, and inspecting takes 20 µs
def parameters_of(function: Callable) -> tuple[str, ...]:
    return tuple(name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD)


def call_named(function: Callable, available: dict[str, Any]) -> Any:
    """Call a function with those of the available values that it names."""
    return function(**{name: available[name] for name in parameters_of(function)})


def answer_of(function: Callable[..., Reason], available: dict[str, Any]) -> Reason:
    """What a `check` or `when` answers. Under a compiler it may be symbolic: then it becomes a guard of the trace."""
    answer = call_named(function, available)
    return bool(answer) if isinstance(answer, torch.SymBool) else answer


def refuse_unknown(role: str, function: Callable | None, available: Sequence[str]) -> None:
    """Raise when a function that is part of a contract names what it cannot be given."""
    if missing := [name for name in parameters_of(function) if name not in available] if function else []:
        raise TypeError(f"{role} names {', '.join(missing)}; it has {', '.join(available)}")


def refuse_words(role: str, **options: Any) -> None:
    """Raise where one word stands for a tuple of them: Python would take its letters."""
    for option, value in options.items():
        if isinstance(value, str):
            raise TypeError(f"{role}: {option} is a tuple of names, not {value!r}; write {option}=({value!r},)")


def refuse_bare_dtypes(role: str, dtypes: Any) -> None:
    """Raise where one dtype stands for a tuple of them."""
    for declared in dtypes.values() if isinstance(dtypes, Mapping) else (dtypes,):
        if isinstance(declared, torch.dtype):
            raise TypeError(f"{role}: dtypes are given as a tuple, not {declared}; write ({declared},)")
