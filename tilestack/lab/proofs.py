"""Proofs on disk: `results/<gpu>/proofs.json` = {"machine": stamp, "proofs": […]}, what was proved of which source.

A line is an operator on a backend in one dtype and direction, with how many claims were proved, refuted and found to say
nothing, the hash of the source they were tried on, and the commit. It stands as long as the source has that hash.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilestack.lab import results
from tilestack.lab.source import source_hash
from tilestack.lab.verify import Proof

NAME = "proofs"
IDENTITY = ("op", "backend", "dtype", "direction")

Line = dict[str, Any]


def load_proofs(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or "proofs" not in found:
        raise ValueError(f"{path} is not a file of proofs; restore it or delete it")
    return found["proofs"]


def lines_of(proofs: Iterable[Proof], machine: dict[str, Any]) -> list[Line]:
    """What was tried, summed up by operator, backend, dtype and direction."""
    groups: dict[tuple, list[Proof]] = {}
    for proof in proofs:
        if proof.ok is not None or proof.says_nothing:
            groups.setdefault(tuple(getattr(proof, name) for name in IDENTITY), []).append(proof)
    return [
        dict(zip(IDENTITY, identity, strict=True))
        | dict(
            proved=sum(p.ok is True for p in mine),
            wrong=sum(p.ok is False for p in mine),
            says_nothing=sum(p.says_nothing for p in mine),
            source=source_hash(mine[0].op, mine[0].backend),
            commit=machine["commit"],
            date=machine["date"],
        )
        for identity, mine in groups.items()
    ]


def save_proofs(path: Path, machine: dict[str, Any], proofs: Iterable[Proof]) -> None:
    """Add a run's lines to a file, new or old: a line of the same identity is replaced where it stands."""
    identity = lambda line: tuple(line[name] for name in IDENTITY)
    merged = {identity(line): line for line in [*load_proofs(path), *lines_of(proofs, machine)]}
    results.save(path, {"machine": machine, NAME: list(merged.values())})


def stands(line: Line) -> bool:
    """Whether a line proves the source as it is now."""
    return not line["wrong"] and line["proved"] > 0 and line["source"] == source_hash(line["op"], line["backend"])
