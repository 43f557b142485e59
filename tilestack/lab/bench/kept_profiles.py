"""Profiles that `tilestack profile --save` keeps: `results/<machine>/profiles.json` = {"machine": stamp, "profiles": […]}.

Each has what was profiled, in the words of a result: `op`, `case`, `dtype` and `backend`, the hash of its source, the commit
and the date. A profile that is made again replaces the one before it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilestack.lab import results
from tilestack.lab.bench.profile import OURS, Profile
from tilestack.lab.stale import present_source

NAME = "profiles"
IDENTITY = ("op", "case", "dtype", "backend")

Kept = dict[str, Any]


def as_kept(profile: Profile, op: str, case: str, dtype: str, backend: str, device: str) -> Kept:
    """A profile in the words of a result."""
    about = {"op": op, "case": case, "dtype": dtype, "backend": backend, "device": device}
    return about | {"source": present_source(op, backend, device)} | profile.as_dict()


def keep(path: Path, machine: dict[str, Any], profile: Kept) -> None:
    """Add a profile to a file, new or old."""
    results.refuse_other_machine(path, machine)
    before = load(path)["profiles"] if path.exists() else []
    same = lambda other: all(other[name] == profile[name] for name in IDENTITY)
    profile |= {name: machine[name] for name in ("commit", "date")}
    kept = [profile if same(other) else other for other in before]
    results.save(path, {"machine": machine, "profiles": kept if any(map(same, before)) else [*before, profile]})


def load(path: Path) -> dict[str, Any]:
    found = results.read_json(path)
    if missing := {"machine", "profiles"} - set(found):
        raise ValueError(f"{path} is not a file of profiles: it has no {', '.join(sorted(missing))}")
    return found


def grouped(profile: Kept) -> dict[str, float]:
    """Milliseconds of each of our kernels by name, and of everybody else's together."""
    found: dict[str, float] = {}
    for line in profile["lines"]:
        name = f"`{line['name']}`" if line["origin"] == OURS else line["origin"]
        found[name] = found.get(name, 0.0) + line["milliseconds"]
    return found


def side_by_side(profiles: Sequence[Kept], least: float) -> dict[str, list[float]]:
    """What took the time of several profiles, line by line, the longest first; what has less than a share of each is
    one line, "other"."""
    columns = [grouped(profile) for profile in profiles]
    totals = [profile["total_ms"] for profile in profiles]
    names = dict.fromkeys(name for column in columns for name in column)
    times = {name: [column.get(name, 0.0) for column in columns] for name in names}
    counts = lambda row: any(each >= least * total for each, total in zip(row, totals, strict=True))
    shown = {name: row for name, row in times.items() if name != "other" and counts(row)}
    shown = dict(sorted(shown.items(), key=lambda pair: -max(pair[1])))
    rest = [sum(times[name][at] for name in times if name not in shown) for at in range(len(profiles))]
    return shown | ({"other": rest} if any(rest) else {})
