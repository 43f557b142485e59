"""Loss curves of `tilestack parity` on disk: `results/<gpu>/parity/curves.json` = {"machine", "model", "runs": […]}.

A run is what was swapped and the loss of every step on the definitions and on the backend; one of the same name replaces it.
What is held against another precision, in place of the definitions, is in a file by its name: `fp8.json`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilestack.lab import results
from tilestack.lab.stale import source_of_run

CURVES, FP8_CURVES = "parity/curves", "parity/fp8"  # a level below the benchmark's files: a curve is no contest


def merge_curves(folder: Path, machine: dict[str, Any], model: str, run: dict[str, Any], name: str = CURVES) -> Path:
    """Keep a run, in the place of an earlier one of its name."""
    path = results.path_of(machine["slug"], name, folder)
    results.refuse_other_machine(path, machine)
    before = results.read_json(path)["runs"] if path.exists() else []
    stamped = run | {"commit": machine["commit"], "source": source_of_run()}
    runs = {kept["name"]: kept for kept in before} | {run["name"]: stamped}
    results.save(path, {"machine": machine, "model": model, "runs": list(runs.values())})
    return path


def mean_of_last_tenth(losses: list[float]) -> float:
    """Where a curve ends, but for what a single batch adds."""
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


def gap_over_starts(ends: Sequence[Sequence[float]]) -> tuple[str, str]:
    """How far above the reference the candidate ends, on average over several starts and with its standard error; and how
    far the ends of the reference itself lie apart, as a standard deviation."""
    if len(ends) < 2:
        return "–", "–"
    above = [candidate - reference for reference, candidate in ends]
    error = statistics.stdev(above) / len(above) ** 0.5
    apart = statistics.stdev(reference for reference, _ in ends)
    return f"{statistics.mean(above):+.3f} ± {error:.3f} over {len(above)} starts", f"{apart:.3f}"


def largest_difference(run: dict[str, Any]) -> float:
    return max(abs(ours - defined) for ours, defined in zip(run["candidate"], run["reference"], strict=True))
