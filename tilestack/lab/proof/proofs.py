"""Proofs on disk: `results/<gpu>/proofs.json` = {"machine": stamp, "proofs": […]}, what was proved of which source.

What is kept is of an operator on a backend in one dtype and direction: how many claims were proved, refuted and found to say
nothing, the first refuted ones in words, the largest error as a part of what is allowed, the hash of the source they were
tried on, and the commit. `proved.py` says which of it stands: what has the hash of the present source. A backend that took
no case in a dtype has a line without claims, so that `--stale` does not ask it again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilestack.lab import results
from tilestack.lab.labels import dtype_name
from tilestack.lab.proof.claims import Proof
from tilestack.lab.proof.workers import ANY, Task, each_backend
from tilestack.lab.source import source_hash
from tilestack.lab.stale import is_current

NAME = "proofs"
COMMAND = "tilestack verify --save"
IDENTITY = ("op", "backend", "dtype", "direction")
REFUTED_KEPT = 4  # in words; all are counted

Kept = dict[str, Any]  # the claims of one identity, summed up


def load_proofs(path: Path) -> list[Kept]:
    """What a file keeps; nothing where there is no file."""
    if not path.exists():
        return []
    found = results.read_json(path)
    if NAME not in found:
        raise ValueError(f"{path} is no file of proofs; restore it, or delete it and let `{COMMAND}` write one")
    return found[NAME]


def summed_up(proofs: Iterable[Proof], machine: dict[str, Any]) -> list[Kept]:
    """What was tried, summed up by operator, backend, dtype and direction."""
    groups: dict[tuple, list[Proof]] = {}
    for proof in proofs:
        mine = groups.setdefault(tuple(getattr(proof, name) for name in IDENTITY), [])
        if proof.ok is not None or proof.says_nothing:
            mine.append(proof)
    taken = {identity[:-1] for identity, mine in groups.items() if mine}
    return [
        dict(zip(IDENTITY, identity, strict=True))
        | dict(
            proved=sum(p.ok is True for p in mine),
            wrong=sum(p.ok is False for p in mine),
            says_nothing=sum(p.says_nothing for p in mine),
            refuted=[f"{p.case} {p.variant}: {p.message}" for p in mine if p.ok is False][:REFUTED_KEPT],
            worst=max((p.error / p.bound for p in mine if p.ok and p.bound), default=0.0),
            source=source_hash(*identity[:2]),
            commit=machine["commit"],
            date=machine["date"],
        )
        for identity, mine in groups.items()
        if mine or (identity[-1] == "forward" and identity[:-1] not in taken)
    ]


def unproved(tasks: Iterable[Task], kept: Iterable[Kept]) -> list[Task]:
    """Of all backends in some tasks, those without a proof that stands, of the present source and with nothing wrong in it,
    though there is something to prove."""
    stands: dict[tuple[str, str, str], bool] = {}
    for each in kept:
        mine = each["op"], each["backend"], each["dtype"]
        stands[mine] = stands.get(mine, True) and is_current(each) and not each["wrong"]
    name = lambda task: (task.operator, task.backend, dtype_name(task.dtype))
    return [task for task in each_backend(tasks) if not stands.get(name(task)) and task.is_taken()]


def save_proofs(path: Path, machine: dict[str, Any], proofs: Iterable[Proof]) -> None:
    """Add a run's proofs to a file, new or old: what is of the same identity is replaced where it stands, and what a process
    that died left by whatever is now known of the same."""
    results.refuse_other_machine(path, machine)
    identity = lambda each: tuple(each[name] for name in IDENTITY)
    new = summed_up(proofs, machine)
    tried_again = {identity(each)[:-1] + (ANY,) for each in new}
    kept = [each for each in load_proofs(path) if identity(each) not in tried_again]
    merged = {identity(each): each for each in [*kept, *new]}
    results.save(path, {"machine": machine, NAME: list(merged.values())})
