"""Proofs on disk: `results/<gpu>/proofs.json` = {"machine": stamp, "proofs": […]}, what was proved of which source.

A line is an operator on a backend in one dtype and direction, with how many claims were proved, refuted and found to say
nothing, the first refuted ones in words, the largest error as a part of what is allowed, the hash of the source they were tried on, and the commit.
`lab/proof/proved.py` says which of them stand: those whose source has that hash.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilestack.lab import results
from tilestack.lab.proof.verify import Proof
from tilestack.lab.proof.workers import ANY, Task, each_backend
from tilestack.lab.source import source_hash
from tilestack.lab.stale import is_current

NAME = "proofs"
IDENTITY = ("op", "backend", "dtype", "direction")
REFUTED_KEPT = 4  # in words; all are counted

Line = dict[str, Any]


def load_proofs(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    found = results.read_json(path)
    if NAME not in found:
        raise ValueError(f"{path} is not a file of proofs; restore it or delete it")
    return found[NAME]


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
            refuted=[f"{p.case} {p.variant}: {p.message}" for p in mine if p.ok is False][:REFUTED_KEPT],
            worst=max((p.error / p.bound for p in mine if p.ok and p.bound), default=0.0),
            source=source_hash(mine[0].op, mine[0].backend),
            commit=machine["commit"],
            date=machine["date"],
        )
        for identity, mine in groups.items()
    ]


def unproved(tasks: Iterable[Task], kept: Iterable[Line]) -> list[Task]:
    """Of all backends in some tasks, those without a proof that stands, of the present source and with nothing wrong in it,
    though there is something to prove."""
    stands: dict[tuple[str, str, str], bool] = {}
    for line in kept:
        mine = line["op"], line["backend"], line["dtype"]
        stands[mine] = stands.get(mine, True) and is_current(line) and not line["wrong"]
    name = lambda task: (task.operator, task.backend, str(task.dtype).removeprefix("torch."))
    return [task for task in each_backend(tasks) if not stands.get(name(task)) and task.is_taken()]


def save_proofs(path: Path, machine: dict[str, Any], proofs: Iterable[Proof]) -> None:
    """Add a run's lines to a file, new or old: a line of the same identity is replaced where it stands, and one of a process
    that died by whatever is now known of the same."""
    results.refuse_other_machine(path, machine)
    identity = lambda line: tuple(line[name] for name in IDENTITY)
    new = lines_of(proofs, machine)
    tried_again = {identity(line)[:-1] + (ANY,) for line in new}
    kept = [line for line in load_proofs(path) if identity(line) not in tried_again]
    merged = {identity(line): line for line in [*kept, *new]}
    results.save(path, {"machine": machine, NAME: list(merged.values())})
