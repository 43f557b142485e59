"""Two sets of results, before and after: which rows became faster or slower by more than their spread.

Rows are the same measurement where operator, case, dtype, direction and backend agree, and were made on the same machine.
What ours did between two commits and what another version of PyTorch did to a peer are both seen here; a peer's change
says how far the machine itself may be off, so peers are counted apart. What was timed before and fails now is no change of
speed, and worse than any.

Rows of serving have a figure in a unit of their own in place of a time, and no spread. They are the same measurement where
the model and the unit agree too, and change where the figure does by more than SERVING_SPREAD.
"""

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tilestack.lab.bench.peers import is_peer
from tilestack.lab.contests import DEFINITION, mean_ratio
from tilestack.lab.labels import case_label
from tilestack.lab.results import IDENTITY, load, load_all, machine_name
from tilestack.lab.rows import EQUAL, FASTER, SLOWER, Stored, verdict
from tilestack.lab.tables import serving
from tilestack.lab.units import microseconds, times

Identity = tuple[str, ...]
# Of 17 figures of one source, measured twice on a CPU, 16 differed by less than 8 %, and one by 13 %.
SERVING_SPREAD = 0.1
CPU_UNIT = "µs of CPU a token"


@dataclass(frozen=True)
class Change:
    """One measurement, made twice."""

    machine: str
    before: Stored
    after: Stored

    @property
    def ratio(self) -> float:
        """How many times faster it is afterwards."""
        if is_figure(self.after):
            return serving.times_as_fast(self.after, self.before)
        return self.before["time_us"] / self.after["time_us"]

    @property
    def verdict(self) -> str:
        """faster, slower or equal: the difference is judged by the spread of both, as against a peer."""
        if is_figure(self.after):
            if max(self.ratio, 1 / self.ratio) <= 1 + SERVING_SPREAD:
                return EQUAL
            return FASTER if self.ratio > 1 else SLOWER
        without_lender = lambda row: row | {"lender": "", "ratio_quartiles": None}
        return verdict(without_lender(self.after), without_lender(self.before))

    @property
    def is_ours(self) -> bool:
        return is_ours(self.after)

    def as_dict(self) -> dict[str, Any]:
        named = {name: self.after[name] for name in IDENTITY}
        before, after = measured(self.before), measured(self.after)
        figures: dict[str, Any] = {"before_us": before, "after_us": after}
        if is_figure(self.after):
            figures = {"before": before, "after": after, "unit": self.after["unit"]}
        figures["ratio"] = self.ratio
        return {"machine": self.machine, **named, **figures, "verdict": self.verdict, "ours": self.is_ours}


def is_figure(row: Stored) -> bool:
    """Whether a row is of serving, with a figure in its own unit in place of a time."""
    return "figure" in row


def measured(row: Stored) -> Any:
    return row["figure"] if is_figure(row) else row["time_us"]


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
        for row in rows_compared(run["rows"]):
            found[machine, *(str(row.get(name, "")) for name in (*IDENTITY, "model", "unit"))] = row
    if not found:
        raise ValueError(
            f"{source} has no times of operators, layers, optimizers or training steps and no figures of serving, "
            "and only these are compared"
        )
    return found


def rows_compared(rows: Iterable[Stored]) -> Iterator[Stored]:
    """The rows that can be compared; one of HTTP is two, for it has the processor's time besides the tokens per second."""
    for row in rows:
        if row.keys() >= set(IDENTITY) and ("time_us" in row or is_figure(row)):  # points of a sweep have no identity
            yield row
            if "cpu_us" in row:
                yield row | {"figure": row["cpu_us"], "unit": CPU_UNIT}


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
        if measured(row) and key in before and measured(before[key])
        and (before[key].get("date"), measured(before[key])) != (row.get("date"), measured(row))
    ]  # fmt: skip
    return sorted(changes, key=lambda change: change.ratio)


def failing(before: dict[Identity, Stored], after: dict[Identity, Stored]) -> list[Stored]:
    """Rows of ours that were timed before, and have a note in place of a time afterwards."""
    timed = lambda key: key in before and measured(before[key])
    return [row for key, row in after.items() if measured(row) is None and is_ours(row) and timed(key)]


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
                in_its_unit(change.before),
                in_its_unit(row),
                times(change.ratio),
                style=colour if change.is_ours else "dim",
            )
        table.add_section()
    return table


def in_its_unit(row: Stored) -> str:
    return f"{serving.figure(row)} {row['unit']}" if is_figure(row) else microseconds(row["time_us"])


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
