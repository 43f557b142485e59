"""Two sets of results, before and after: which rows became faster or slower by more than their spread.

Rows are the same measurement where operator, case, dtype, direction and backend agree, and were made on the same machine.
What ours did between two commits and what another version of PyTorch did to a peer are both seen here; a peer's change
says how far the machine itself may be off, so peers are counted apart. What was timed before and fails now is no change of
speed, and worse than any.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tilestack.lab.bench.peers import is_peer
from tilestack.lab.contests import DEFINITION, mean_ratio
from tilestack.lab.labels import case_label
from tilestack.lab.results import IDENTITY, load, load_all, machine_name
from tilestack.lab.rows import EQUAL, FASTER, SLOWER, Stored, verdict
from tilestack.lab.units import microseconds, times

Identity = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One measurement, made twice."""

    machine: str
    before: Stored
    after: Stored

    @property
    def ratio(self) -> float:
        """How many times faster it is afterwards."""
        return self.before["time_us"] / self.after["time_us"]

    @property
    def verdict(self) -> str:
        """faster, slower or equal: the difference is judged by the spread of both, as against a peer."""
        without_lender = lambda row: row | {"lender": "", "ratio_quartiles": None}
        return verdict(without_lender(self.after), without_lender(self.before))

    @property
    def is_ours(self) -> bool:
        return is_ours(self.after)

    def as_dict(self) -> dict[str, Any]:
        named = {name: self.after[name] for name in IDENTITY}
        figures = {"before_us": self.before["time_us"], "after_us": self.after["time_us"], "ratio": self.ratio}
        return {"machine": self.machine, **named, **figures, "verdict": self.verdict, "ours": self.is_ours}


def is_ours(row: Stored) -> bool:
    return not is_peer(row["backend"]) and row["backend"] != DEFINITION


def rows_of(source: str, folder: Path = Path("results")) -> dict[Identity, Stored]:
    """The rows of what was to be timed: of a results file, of a folder of them, or of `results/` as a git revision has it."""
    path = Path(source)
    if path.is_file():
        runs: Iterable[dict[str, Any]] = [load(path)]
    elif path.is_dir():
        runs = runs_of_folder(path)
    else:
        runs = runs_of_revision(source, folder)
    found: dict[Identity, Stored] = {}
    for run in runs:
        machine = machine_name(run["machine"]) or "unknown"
        for row in run["rows"]:
            if "time_us" in row and row.keys() >= set(IDENTITY):  # points of a sweep have no identity
                found[machine, *(str(row[name]) for name in IDENTITY)] = row
    if not found:
        raise ValueError(
            f"{source} has no times of operators, layers, optimizers or training steps, and only these are compared"
        )
    return found


def runs_of_folder(path: Path) -> list[dict[str, Any]]:
    """The results files of a folder like `results/`, or of one machine's folder in it."""
    if runs := [*load_all(path, "*.json").values(), *load_all(path).values()]:
        return runs
    raise ValueError(f"{path} has no results: they are <machine>/<name>.json below it, as `bench --save` writes")


def runs_of_revision(revision: str, folder: Path) -> list[dict[str, Any]]:
    """The results files of a commit, tag or branch."""
    if revision.startswith("-"):
        raise ValueError(f"{revision} is no file, folder or git revision")
    listed = git("ls-tree", "-r", "--name-only", revision, "--", str(folder))
    if listed is None:
        raise ValueError(f"{revision} is no results file, no folder of them, and no git revision here")
    names = [name for name in listed.splitlines() if name.endswith(".json") and len(Path(name).parts) == 3]
    contents = [json.loads(git("show", f"{revision}:./{name}") or "{}") for name in names]
    if not (runs := [run for run in contents if {"machine", "rows"} <= run.keys()]):
        raise ValueError(f"{revision} has no results in {folder}")
    return runs


def git(*arguments: str) -> str | None:
    """What git says in this folder; None where it refuses or is not there."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def compare_results(before: dict[Identity, Stored], after: dict[Identity, Stored]) -> list[Change]:
    """What both have measured, at different times; the largest change for the worse first."""
    changes = [
        Change(key[0], before[key], row)
        for key, row in after.items()
        if row["time_us"] and key in before and before[key]["time_us"]
        and (before[key].get("date"), before[key]["time_us"]) != (row.get("date"), row["time_us"])
    ]  # fmt: skip
    return sorted(changes, key=lambda change: change.ratio)


def failing(before: dict[Identity, Stored], after: dict[Identity, Stored]) -> list[Stored]:
    """Rows of ours that were timed before, and have a note in place of a time afterwards."""
    timed = lambda key: key in before and before[key]["time_us"]
    return [row for key, row in after.items() if row["time_us"] is None and is_ours(row) and timed(key)]


def render_changes(changes: Sequence[Change], most: int | None) -> Table | str:
    """The changes beyond the spread, at most so many for the worse and for the better; peers are dim. Without any, the
    counts alone."""
    table = Table(
        title="what changed", title_justify="left", caption=summary_of_changes(changes), caption_justify="left"
    )
    for heading in ("what", "case"):
        table.add_column(heading, overflow="fold")
    for heading in ("before", "after", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    slower = [change for change in changes if change.verdict == SLOWER][:most]
    faster = [change for change in changes if change.verdict == FASTER][::-1][:most]
    if not slower and not faster:
        return summary_of_changes(changes)
    for some, colour in ((slower, "red"), (faster, "green")):
        for change in some:
            row = change.after
            table.add_row(
                f"{row['op']} {row['direction']}, {row['backend']}",
                f"{case_label(row['op'], row['case'])}, {row['dtype']}",
                microseconds(change.before["time_us"]),
                microseconds(row["time_us"]),
                times(change.ratio),
                style=colour if change.is_ours else "dim",
            )
        table.add_section()
    return table


def summary_of_changes(changes: Sequence[Change]) -> str:
    """How many became faster, slower and neither; ours and peers apart."""
    said = []
    for whose, some in (
        ("ours", [change for change in changes if change.is_ours]),
        ("peers", [change for change in changes if not change.is_ours]),
    ):
        if some:
            count = lambda word: sum(change.verdict == word for change in some)
            mean = times(mean_ratio([change.ratio for change in some]))
            said.append(
                f"{whose}: {count(FASTER)} faster, {count(SLOWER)} slower, {count(EQUAL)} equal; "
                f"geometric mean {mean} as fast as before"
            )
    return "\n".join(said) or "nothing of the one was measured again in the other"
