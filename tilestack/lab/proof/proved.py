"""Which claims are proved on a GPU of the present source: what `verify --save` kept, held against the source of today.

A backend is proved when all that is kept of it in `proofs.json` (proofs.py) is of the source it has now and none of its
claims was found wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilestack.contract import operators
from tilestack.lab.bench.peers import our_backends
from tilestack.lab.proof.proofs import COMMAND, NAME, Kept, load_proofs
from tilestack.lab.report.page import Section, empty, table, text
from tilestack.lab.results import path_of
from tilestack.lab.stale import is_current


@dataclass(frozen=True)
class Standing:
    """What is proved of an operator on a backend of ours; no claims where nothing is."""

    op: str
    backend: str
    proofs: Sequence[Kept]

    @property
    def claims(self) -> int:
        return sum(proof["proved"] + proof["wrong"] for proof in self.proofs)

    @property
    def wrong(self) -> int:
        return sum(proof["wrong"] for proof in self.proofs)

    @property
    def worst(self) -> float | None:
        """The largest error as a part of what was allowed."""
        return max((proof["worst"] for proof in self.proofs), default=None)

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(proof["dtype"] for proof in self.proofs))

    @property
    def directions(self) -> list[str]:
        return list(dict.fromkeys(proof["direction"] for proof in self.proofs))

    @property
    def is_proved(self) -> bool:
        return bool(self.claims) and not self.wrong and all(map(is_current, self.proofs))

    @property
    def status(self) -> str:
        """In words: proved, wrong, proved of an older source in whole or in part, or not at all."""
        if not self.claims:
            return "no proof"
        if self.wrong:
            return f"{self.wrong} of {self.claims} claims fail"
        old = [proof for proof in self.proofs if not is_current(proof)]
        if not old:
            return "yes"
        part = ", ".join(f"{proof['dtype']} {proof['direction']}" for proof in old) + " "
        which = part if len(old) < len(self.proofs) else ""
        return f"{which}of an older source ({', '.join(dict.fromkeys(proof['commit'] for proof in old))})"


def standings(folder: Path, slug: str) -> list[Standing]:
    """Where every backend of ours of every operator stands, with or without proofs."""
    kept = [proof for proof in load_proofs(path_of(slug, NAME, folder)) if proof["proved"] + proof["wrong"]]
    return [
        Standing(op.name, backend, [proof for proof in kept if (proof["op"], proof["backend"]) == (op.name, backend)])
        for op in operators()
        for backend in our_backends(op)
    ]


def gpus(folder: Path) -> list[str]:
    """The GPUs that have results in a folder, and so should have proofs."""
    return sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name != "cpu")


def sections(folders: Sequence[Path], here: str) -> dict[str, Section]:
    """By slug, the proofs kept of every GPU in some folders, and of this machine, which may have none."""
    shown = lambda folder: {*gpus(folder), *([here] if path_of(here, NAME, folder).is_file() else [])}
    return {slug: proofs_section(folder, slug) for folder in folders for slug in shown(folder)}


def proofs_section(folder: Path, slug: str) -> Section:
    """The proofs of a GPU as a part of the report."""
    found = standings(folder, slug)
    there = sum(each.is_proved for each in found)
    lede = f"{there} of {len(found)} backends are proved on this GPU as their source is now."
    if not any(each.claims for each in found):
        return Section(f"Proved on {slug}", lede, empty("No proofs were kept. On that GPU, run", COMMAND))
    rows = [
        [text(each.op), text(each.backend), (f'<b class="{"good" if each.is_proved else "bad"}">{text(each.status)}</b>', each.is_proved), text(", ".join(each.dtypes)), text(", ".join(each.directions)), (f"{each.claims:,}", each.claims)]
        for each in found
    ]  # fmt: skip
    header = ["operator", "backend", "proved", "dtypes", "directions", "claims"]
    return Section(f"Proved on {slug}", lede, table(header, rows, left=5, filtered=True))
