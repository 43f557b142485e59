"""Putting our operators into a model that is already there, and taking them out again.

    report = tilestack.patch(model)      # all that is recognised
    tilestack.patch(model, only=["rms_norm", "*.mlp.*"], skip="lm_head")
    tilestack.unpatch(model)             # exactly as it was

A module is swapped by giving the same object another class: a subclass of its own whose `forward` is ours. Everything
a module has lives in the object and stays: parameters (tied ones too), buffers, hooks, the training flag, the state
dict, its place in the model, its `isinstance`. A `forward` set on the instance would do less: a pickle of it comes back
as the original, and it clashes with wrappers that set one themselves, as accelerate's offloading does. A class is what
torch.compile guards on, what deepcopy and pickle rebuild, and what FSDP's `fully_shard`, which swaps classes too, builds
upon. Patch before wrapping, while weights are plain tensors; sharded ones are left alone.
"""

import fnmatch
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilestack.nn.recognise import OPERATORS, recognise


@dataclass
class Report:
    """What `patch` did: the operator of each module swapped, and why each familiar module left alone was."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many modules were swapped for each operator."""
        return dict(Counter(self.swapped.values()).most_common())

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {operator}" for operator, count in self.counts.items())
        modules = "module runs" if len(self.swapped) == 1 else "modules run"
        lines = [f"{len(self.swapped)} {modules} on tilestack" + (f": {counts}" if counts else "")]
        reasons = Counter(self.left.values())
        for reason, count in reasons.most_common():
            first = next(path for path, given in self.left.items() if given == reason)
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"left alone: {first or 'the model itself'}{others}, {reason}")
        return "\n".join(lines)


class Swapped:
    """Marks a module whose class was swapped; copies and pickles by rebuilding the class, which has no importable name."""

    ours: type
    theirs: type

    def __reduce_ex__(self, protocol: Any) -> tuple:
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return revive, (self.ours, self.theirs), *state


@functools.cache
def swapped(ours: Any, theirs: Any) -> type:
    """Their class with our forward, under their name, which some libraries look at."""
    return type(theirs.__name__, (Swapped, ours, theirs), {"ours": ours, "theirs": theirs, "__doc__": theirs.__doc__})


def revive(ours: type, theirs: type) -> torch.nn.Module:
    kind = swapped(ours, theirs)
    return kind.__new__(kind)  # type: ignore[call-overload]


def patch(
    model: torch.nn.Module, *, only: str | Iterable[str] | None = None, skip: str | Iterable[str] | None = None
) -> Report:
    """Run the model's modules on our operators wherever they compute the same, in place; `unpatch` takes it back.

    `only` and `skip` choose by operator (`rms_norm`) or by path in the model (`lm_head`, `model.layers.*.mlp`, with all
    that is below), one pattern or several. Patching again adds what was left out before. A caller that reads weights
    instead of calling modules bypasses the swap, as torch.nn.TransformerEncoderLayer does in inference.
    """
    modules = named_modules(model)
    wanted, unwanted = patterns(only, modules), patterns(skip, modules)
    report = Report()
    for path, module in modules.items():
        match = recognise(module)
        if match is None:
            continue
        if isinstance(match, str):
            report.left[path] = match
        elif only is not None and not chosen(path, match.operator, wanted):
            report.left[path] = "`only` does not name it"
        elif chosen(path, match.operator, unwanted):
            report.left[path] = "`skip` names it"
        else:
            module.__class__ = swapped(match.ours, type(module))  # type: ignore[arg-type]
            report.swapped[path] = match.operator
    return report


def unpatch(model: torch.nn.Module) -> int:
    """Give every module that `patch` swapped its own class back; returns how many there were."""
    ours = {path: module for path, module in named_modules(model).items() if isinstance(module, Swapped)}
    for path, module in ours.items():
        if "theirs" not in vars(type(module)) or "forward" in vars(module):
            raise RuntimeError(
                f"{path or 'the model'} was wrapped, as {type(module).__name__}, after it was patched; unwrap it first"
            )
    for module in ours.values():
        module.__class__ = module.theirs
    return len(ours)


def named_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    return dict(model.named_modules())


def patterns(given: str | Iterable[str] | None, modules: Iterable[str]) -> list[str]:
    """The patterns as a list, each of which names something."""
    listed = [given] if isinstance(given, str) else list(given or ())
    for pattern in listed:
        if not fnmatch.filter([*modules, *OPERATORS.values()], pattern):
            operators = ", ".join(sorted(set(OPERATORS.values())))
            raise ValueError(f"{pattern!r} is neither the path of a module in this model nor one of {operators}")
    return listed


def chosen(path: str, operator: str, patterns: list[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for each in patterns
        for pattern, name in ((each, operator), (each, path), (f"{each}.*", path))
    )
