"""Measured results on disk: `results/<gpu>/<name>.json` = {"machine": stamp, "roofs": {…}, "rows": […]}.

Every published figure comes from these files. A run is merged into its file row by row: what was measured again replaces
what was there. The machine's stamp is that of the last run; each row says its own commit and date. A file is replaced
in one step, so a crash leaves the old one or the new one, never half of one.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tilestack.files import write_text_whole

FOLDER = Path("results")
IDENTITY = ("op", "case", "dtype", "direction", "backend")  # rows that agree in these are measurements of one thing

Results = dict[str, Any]


def path_of(slug: str, name: str, folder: Path = FOLDER) -> Path:
    return folder / slug / f"{name}.json"


def load(path: Path) -> Results:
    found = read_json(path)
    if missing := {"machine", "roofs", "rows"} - set(found):
        raise ValueError(f"{path} is not a results file: it has no {', '.join(sorted(missing))}")
    return found


def load_all(folder: Path = FOLDER, pattern: str = "*/*.json") -> dict[Path, Results]:
    """Every results file below a folder, by path; what `verify` keeps beside them has no rows."""
    return {path: load(path) for path in sorted(folder.glob(pattern)) if "rows" in read_json(path)}


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it or move it away") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a file of results: it holds no object; restore it or move it away")
    return found


def machine_name(stamp: dict[str, Any]) -> str:
    """The GPU that a stamp is of, or without one the CPU; empty where it names none."""
    return stamp.get("gpu") or stamp.get("cpu") or ""


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two stamps are of one kind of machine: the same GPU, or without one the same CPU."""
    return machine_name(one) == machine_name(other)


def refuse_other_machine(path: Path, machine: dict[str, Any]) -> None:
    """Refuse to add to a file of another machine: its figures would stand under the name of this one."""
    there = read_json(path).get("machine", machine) if path.exists() else machine
    if not same_machine(there, machine):
        mine, theirs = machine_name(machine), machine_name(there)
        raise ValueError(f"{path} holds figures of {theirs}, and this is {mine}; move it away first")


def save(path: Path, results: Results) -> None:
    """Write a results file in one step: readers see the old one or the new one."""
    write_text_whole(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def merge(
    path: Path,
    machine: dict[str, Any],
    roofs: dict[str, Any],
    rows: Iterable[dict[str, Any]],
    same: Sequence[str] = (),
) -> Results:
    """Add a run's rows to a file, new or old: those that are the `same` in these, by default of the same identity, are
    replaced where they stand."""
    refuse_other_machine(path, machine)
    identity = lambda row: tuple(row[name] for name in same or IDENTITY)
    before = load(path)["rows"] if path.exists() else []
    when = {name: machine[name] for name in ("commit", "date")}
    merged = {identity(row): row for row in before} | {identity(row): row | when for row in rows}
    results = {"machine": machine, "roofs": roofs, "rows": list(merged.values())}
    save(path, results)
    return results
