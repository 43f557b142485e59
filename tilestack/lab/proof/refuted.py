"""What is said of claims that turned out wrong: where a kernel crashed, and the same words once."""

import re
import traceback
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape

from tilestack.lab.labels import case_label
from tilestack.lab.proof.claims import Proof

PACKAGE = Path(__file__).resolve().parents[2]
CRASHED = re.compile(r" \(\S+:\d+\)$")  # what `crash_line` ends with
MACHINERY = (PACKAGE / "contract", PACKAGE / "lab", PACKAGE / "cli")


def crash_line(failure: BaseException) -> str:
    """An exception's first line, and the file and line of the kernel that it comes from."""
    said = str(failure).strip().splitlines()
    where = crash_site(failure)
    return f"{type(failure).__name__}: {said[0] if said else ''}{f' ({where})' if where else ''}"


def crash_site(failure: BaseException) -> str:
    """The deepest place in a traceback that is neither ours, but for kernels, nor an installed package's."""
    frames = list(traceback.extract_tb(failure.__traceback__))
    if failure.__cause__ is not None:
        frames += traceback.extract_tb(failure.__cause__.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_file() and "site-packages" not in path.parts and not any(map(path.is_relative_to, MACHINERY)):
            return f"{path}:{frame.lineno}"
    return ""


def refutations(proofs: Iterable[Proof]) -> list[str]:
    """A line for every refutation, with the case; all crashes of a backend in one place share a line."""
    groups: dict[tuple[str, ...], list[Proof]] = {}
    for proof in proofs:
        if proof.ok is False:
            case = () if CRASHED.search(proof.message) else (proof.case, proof.variant, proof.dtype, proof.direction)
            groups.setdefault((proof.op, proof.backend, proof.message, *case), []).append(proof)
    lines = []
    for first, *others in groups.values():
        which = f"{case_label(first.op, first.case)}, {first.variant} {first.dtype} {first.direction}"
        more = f" and {len(others)} more" if others else ""
        lines.append(f"[red]WRONG[/red] {first.op} {first.backend} {which}{more}: {escape(first.message)}")
    return lines
