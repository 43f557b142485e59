"""What is told of an attempt that is wrong: what happened, where, the numbers, and what may explain it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Element:
    """One number of a result beside the right one, in words."""

    place: str
    yours: str
    right: str


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong with an attempt."""

    what: str
    call: str = ""  # the operator and its arguments
    claim: str = ""  # the variant, dtype and direction
    elements: list[Element] = field(default_factory=list)  # the first wrong ones
    line: int | None = None  # of the learner's file
    code: str = ""  # what stands there
    advice: list[str] = field(default_factory=list)


def code_in(path: Path, line: int | None) -> str:
    """A line of a file, without the spaces around it; empty where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[line - 1].strip() if line and line <= len(lines) else ""
