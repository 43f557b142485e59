"""What became of the mutants, on disk: `results/mutation.json` = {"files": {file: what is known of it}}.

A file's mutants are tried in an order drawn once, so how many were tried says which, and a later run goes on from there as
long as the file's code is the same. Beside it `mutation_reasons.json`, written by people, says why each survivor lives; a
reason that begins with `equivalent` says that nothing is wrong with the mutant, one that begins with `seen on a GPU only`
that something is, which the interpreter does not show. The others are holes in the proofs.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tilestack.files import alone_in
from tilestack.lab import results
from tilestack.lab.mutation.mutants import KINDS
from tilestack.lab.source import code_of

if TYPE_CHECKING:
    from tilestack.lab.mutation.suite import Outcome

KERNELS = Path(__file__).parents[2] / "kernels"
FOLDER = Path(__file__).parents[3] / "results"
NAME, REASONS = "mutation.json", "mutation_reasons.json"
EQUIVALENT, GPU_ONLY = "equivalent", "seen on a GPU only"
WANTED = 0.95
COMMAND = "python -m tests.mutation"


@dataclass
class Tried:
    """What is known of a file's mutants: by kind how many were caught of how many, and the survivors by name."""

    source: str  # a hash of the code
    mutants: int
    commit: str = ""
    tried: int = 0
    caught: dict[str, list[int]] = field(default_factory=dict)
    survivors: dict[str, int] = field(default_factory=dict)  # with how many claims reach it and are true of it
    by_tests: dict[str, str] = field(default_factory=dict)  # of those caught, which outlived every claim, and the test

    def add(self, outcome: "Outcome", by_test: bool = False) -> None:
        mutant = outcome.mutant
        counts = self.caught.setdefault(mutant.kind, [0, 0])
        if mutant.name in self.survivors:  # tried again
            del self.survivors[mutant.name]
        else:
            self.tried += 1
            counts[1] += 1
        counts[0] += outcome.caught
        if outcome.caught and by_test:
            self.by_tests[mutant.name] = outcome.message
        if not outcome.caught:
            self.survivors[mutant.name] = outcome.claims

    @property
    def caught_of_all(self) -> int:
        return sum(caught for caught, _ in self.caught.values())


@dataclass(frozen=True)
class Family:
    """The files of one folder of kernels together."""

    name: str
    files: dict[str, Tried]
    equivalent: int
    gpu_only: int
    stale: list[str]  # files whose code has changed since

    mutants = property(lambda self: sum(found.mutants for found in self.files.values()))
    tried = property(lambda self: sum(found.tried for found in self.files.values()))
    caught = property(lambda self: sum(found.caught_of_all for found in self.files.values()))
    by_tests = property(lambda self: sum(len(found.by_tests) for found in self.files.values()))

    @property
    def holes(self) -> int:
        """Survivors that something is wrong with, and that no proof is known to see."""
        return self.tried - self.caught - self.equivalent - self.gpu_only

    @property
    def unreached(self) -> list[str]:
        """Files that nothing reaches where kernels are interpreted."""
        return [file for file, found in self.files.items() if found.mutants and not found.tried]

    def caught_of_kind(self, kind: str) -> str:
        """`3/4`: how many mutants of a kind were caught, of how many; empty where there is none."""
        counts = [found.caught[kind] for found in self.files.values() if kind in found.caught]
        return "/".join(map(str, map(sum, zip(*counts, strict=True))))

    @property
    def share(self) -> float:
        """How many were caught of those that something is wrong with, those included that only a GPU would show."""
        return self.caught / max(self.tried - self.equivalent, 1)


def code_hash(file: str) -> str:
    """Of a file of kernels, as `norm.rows`; empty where there is none any more."""
    path = (KERNELS / file.replace(".", "/")).with_suffix(".py")
    return hashlib.sha256(code_of(path).encode()).hexdigest()[:16] if path.exists() else ""


def load_tried(folder: Path = FOLDER) -> dict[str, Tried]:
    path = folder / NAME
    return {file: Tried(**found) for file, found in results.read_json(path)["files"].items()} if path.exists() else {}


def reasons(folder: Path = FOLDER) -> dict[str, str]:
    path = folder / REASONS
    return results.read_json(path) if path.exists() else {}


def save_tried(file: str, found: Tried, folder: Path = FOLDER) -> None:
    """Put what is known of a file in the place of what was kept of it, and forget files that are no more."""
    with alone_in(folder):
        kept = load_tried(folder) | {file: found}
        results.save(folder / NAME, {"files": {name: as_json(kept[name]) for name in sorted(kept) if code_hash(name)}})


def as_json(found: Tried) -> dict[str, Any]:
    """What is known of a file as it is kept: of few files is there something that only a test has caught."""
    return {name: value for name, value in asdict(found).items() if value or name != "by_tests"}


def families(folder: Path = FOLDER) -> list[Family]:
    files, known = load_tried(folder), reasons(folder)
    names = dict.fromkeys(file.partition(".")[0] for file in sorted(files))
    of_family = {name: {f: found for f, found in files.items() if f.partition(".")[0] == name} for name in names}
    living = lambda mine: [known.get(name, "") for found in mine.values() for name in found.survivors]
    because = lambda mine, reason: sum(given.startswith(reason) for given in living(mine))
    return [
        Family(
            name,
            mine,
            because(mine, EQUIVALENT),
            because(mine, GPU_ONLY),
            [file for file, found in mine.items() if found.source != code_hash(file)],
        )
        for name, mine in of_family.items()
    ]


def total(found: list[Family]) -> Family:
    files = {file: tried for family in found for file, tried in family.files.items()}
    together = lambda count: sum(getattr(family, count) for family in found)
    return Family("all", files, together("equivalent"), together("gpu_only"), [file for f in found for file in f.stale])


def report(console: Console) -> int:
    """The catch rate of every family, and every survivor with its reason; 1 where that is not enough."""
    table = Table(
        "family", *KINDS, "tried", "of", "caught", "by a test", "equivalent", "GPU only", "holes", "share",
        title="Mutants caught, of those tried",
    )  # fmt: skip
    found = families()
    for family in [*found, total(found)]:
        tried = family.tried, family.mutants, family.caught, family.by_tests
        living = family.equivalent, family.gpu_only, family.holes
        table.add_row(
            family.name, *map(family.caught_of_kind, KINDS), *map(str, (*tried, *living)), f"{family.share:.1%}"
        )
    console.print(table)
    known = reasons()
    survivors = [name for tried in total(found).files.values() for name in tried.survivors]
    for name in survivors:
        console.print(f"survived: {name}: {known.get(name, 'NO REASON KNOWN')}", highlight=False, markup=False)
    too_few = [family.name for family in found if family.tried and family.share < WANTED]
    return int(bool(too_few) or any(name not in known for name in survivors))
