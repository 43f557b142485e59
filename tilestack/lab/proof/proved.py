"""Which claims are proved on a GPU of the present source: what `verify --save` kept, held against the source of today.

`results/<gpu>/proofs.json` = {"proofs": [{op, backend, dtype, direction, proved, wrong, source, commit, …}]}, the two in
the middle counting claims; the largest error is there as `worst` where it was kept. A backend is proved when all its
proofs are of the source it has now and none found it wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilestack.contract import operators
from tilestack.lab.bench.peers import our_backends
from tilestack.lab.report.page import Section, empty, table, text
from tilestack.lab.results import read_json
from tilestack.lab.stale import is_current

VERIFY = "tilestack verify --save"


@dataclass(frozen=True)
class Line:
    """What is proved of an operator on a backend of ours; no claims where nothing is."""

    op: str
    backend: str
    proofs: Sequence[dict[str, Any]]

    @property
    def claims(self) -> int:
        return sum(proof.get("claims", proof.get("proved", 0) + proof["wrong"]) for proof in self.proofs)

    @property
    def wrong(self) -> int:
        return sum(proof["wrong"] for proof in self.proofs)

    @property
    def worst(self) -> float | None:
        """The largest error as a part of what was allowed."""
        return max((proof["worst"] for proof in self.proofs if proof.get("worst") is not None), default=None)

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


def lines(folder: Path, slug: str) -> list[Line]:
    """A line for every backend of ours of every operator, with or without proofs."""
    path = folder / slug / "proofs.json"
    kept = read_json(path).get("proofs") if path.exists() else []
    if kept is None:
        raise ValueError(f"{path} is no file of proofs: it has no proofs; `{VERIFY}` writes one")
    return [
        Line(op.name, backend, [proof for proof in kept if (proof["op"], proof["backend"]) == (op.name, backend)])
        for op in operators()
        for backend in our_backends(op)
    ]


def gpus(folder: Path) -> list[str]:
    """The GPUs that have results in a folder, and so should have proofs."""
    return sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name != "cpu")


def sections(folders: Sequence[Path], here: str) -> dict[str, Section]:
    """By slug, the proofs kept of every GPU in some folders, and of this machine, which may have none."""
    shown = lambda folder: {*gpus(folder), *([here] if (folder / here / "proofs.json").is_file() else [])}
    return {slug: proofs_section(folder, slug) for folder in folders for slug in shown(folder)}


def proofs_section(folder: Path, slug: str) -> Section:
    """The proofs of a GPU as a part of the report."""
    found = lines(folder, slug)
    there = sum(line.is_proved for line in found)
    lede = f"{there} of {len(found)} backends are proved on this GPU as their source is now."
    if not any(line.claims for line in found):
        return Section(f"Proved on {slug}", lede, empty("No proofs were kept. On that GPU, run", VERIFY))
    rows = [
        [text(line.op), text(line.backend), (f'<b class="{"good" if line.is_proved else "bad"}">{text(line.status)}</b>', line.is_proved), text(", ".join(line.dtypes)), text(", ".join(line.directions)), (f"{line.claims:,}", line.claims)]
        for line in found
    ]  # fmt: skip
    header = ["operator", "backend", "proved", "dtypes", "directions", "claims"]
    return Section(f"Proved on {slug}", lede, table(header, rows, left=5, filtered=True))
