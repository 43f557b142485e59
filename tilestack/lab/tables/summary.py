"""The README's one table: training steps, serving and operators, each group of cases on one line.

A group's line shows its *median* case, the one in the middle when the group's cases are sorted by their ratio to the
fastest peer (the lower of two), then the least and the greatest ratio and how many cases are won. Nobody picks a case, so
a group that mostly loses shows a loss. Beside the operators that a page names stand the WEAKEST of all others. Cases
without a peer, and those that run a peer's own kernel, are left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilestack.lab.bench.peers import COMPILED, OF_OPERATORS
from tilestack.lab.contests import Contest, Result, contests, mean_ratio, results_under, score
from tilestack.lab.results import machine_name, path_of, read_json
from tilestack.lab.rows import EQUAL, FASTER, SLOWER, UNCLEAR
from tilestack.lab.stale import LAYER, TRAINING, is_current
from tilestack.lab.tables.markdown import OLD, markdown, not_measured
from tilestack.lab.tables.serving import figure, is_ours, on_the_same_work, times_as_fast
from tilestack.lab.units import microseconds, times

WEAKEST = 3  # how many operators are shown because they do worst, by the geometric mean over their cases
OURS = "tilestack"  # an engine as it runs without options
COMPILE, MODE = "`torch.compile`", "its mode `max-autotune`"  # of which a comparison may be without
TRAINING_STEP, DECODER_LAYER = "training step", "layer of a decoder"
KINDS = {"ms/step": "decode step", "ms": "time to first token", "tokens/s": "throughput"}  # of a workload, by its unit
WORKLOADS = {
    "throughput": "requests of mixed lengths",
    "prefix": "requests with a shared prefix",
    "copying": "a text that repeats itself",
    "first token": "one prompt",
}  # what to call those of `bench serve` whose names say little here
VERSIONS = {"torch": "torch", "Triton": "triton", "cuDNN": "cudnn", "transformers": "transformers"}
HEADER = ["what", "median case", "ours", "fastest peer", "ratio", "worst – best ratio", "cases won"]


@dataclass(frozen=True)
class Line:
    """One case of a group: ours beside the fastest peer."""

    group: str
    case: str
    ours: str
    peer: str
    ratio: float
    verdict: str
    stale: bool
    dates: Sequence[str]
    without: str = ""  # what of torch.compile, the peer of every operator, was not tried


def summary(folder: Path, gpu: str, cpu: str, names: str) -> str:
    """The table of training and serving on a GPU, of serving on a CPU, and of the named operators."""
    runs = [run for run in results_under(folder) if run.slug == gpu]
    measured = [line for contest in contests(runs) if (line := line_of(contest))]
    served = [line for slug in (gpu, cpu) for line in lines_of_serving(folder, slug)]
    of_models = [line for group in (DECODER_LAYER, TRAINING_STEP) for line in measured if line.group == group]
    operators = [line for line in measured if line not in of_models]
    worst = weakest(operators)
    wanted = list(dict.fromkeys([*(f"`{name}`" for name in names.split(",")), *worst]))
    shown = of_models + served + [line for name in wanted for line in operators if line.group == name]
    if not shown:
        return not_measured("tilestack bench all --save", gpu=gpu)
    rows = [row_of_group([line for line in shown if line.group == group]) for group in dict.fromkeys(line.group for line in shown)]  # fmt: skip
    parts = [
        markdown(HEADER, rows, left=2),
        over_all(operators, worst),
        measured_where(folder, [gpu, cpu], runs, shown + operators),
    ]
    if any(line.stale for line in shown + operators):
        parts.append(f"_{OLD} some of these cases were measured on an earlier version of the code._")
    return "\n\n".join(filter(None, parts))


def row_of_group(lines: list[Line]) -> list[str]:
    """A group's cells."""
    ordered = sorted(lines, key=lambda line: line.ratio)
    middle = ordered[(len(ordered) - 1) // 2]
    name = f"{middle.group} {OLD}" if any(line.stale for line in lines) else middle.group
    ratio = times(middle.ratio)
    ratio = {FASTER: f"**{ratio}**", EQUAL: f"{ratio} (equal)", UNCLEAR: f"{ratio} (unclear)"}.get(
        middle.verdict, ratio
    )
    spread = f"{times(ordered[0].ratio)} – {times(ordered[-1].ratio)}" if len(ordered) > 1 else "–"
    won = str(score(line.verdict for line in lines))
    return [name, middle.case, middle.ours, middle.peer, ratio, spread, won]


def weakest(operators: list[Line]) -> list[str]:
    """The operators whose cases come to the lowest mean ratio, the lowest first."""
    ratios: dict[str, list[float]] = {}
    for line in operators:
        ratios.setdefault(line.group, []).append(line.ratio)
    return sorted(ratios, key=lambda group: mean_ratio(ratios[group]))[:WEAKEST]


def over_all(operators: list[Line], worst: list[str]) -> str:
    """What all operators and optimizers come to, those that have no line of their own included."""
    if not operators:
        return ""
    found = score(line.verdict for line in operators)
    number = len({line.group for line in operators})
    mean = mean_ratio([line.ratio for line in operators])
    mark = f" {OLD}" if any(line.stale for line in operators) else ""
    without = Counter(line.without for line in operators if line.without)
    left_out = ", ".join(f"{without[what]} without {what}" for what in (COMPILE, MODE) if without[what])
    said = f"All {number} operators and optimizers with a peer, {found.met} comparisons{mark}: {found.won} won, {found.equal} equal, {found.lost} lost; geometric mean {times(mean)}. Lowest mean: {', '.join(worst)}."
    return f"_{said} Of these, {left_out}._" if left_out else f"_{said}_"


def line_of(contest: Contest) -> Line | None:
    """A contest of an operator, an optimizer or a training step; None without a peer or on a peer's kernel."""
    ours, peer = contest.ours, contest.peer
    if ours is None or peer is None or not contest.ratio or contest.borrowed:
        return None
    group, case = f"`{contest.op}`", f"{contest.label}, {contest.dtype} {contest.direction}"
    if contest.op == TRAINING:
        group, case = TRAINING_STEP, contest.label
    elif contest.op == LAYER:
        group = DECODER_LAYER
    return Line(
        group,
        case,
        microseconds(ours["time_us"]),
        f"{microseconds(peer['time_us'])} ({peer['backend']})",
        contest.ratio,
        contest.verdict,
        contest.stale,
        [date_of(row, contest.run.machine) for row in (ours, peer)],
        left_out_of(contest) if peer["backend"] in OF_OPERATORS else "",
    )


def left_out_of(contest: Contest) -> str:
    """What of torch.compile was not tried beside an operator."""
    tried = {row["backend"] for row in contest.rows}
    if not tried & set(COMPILED):
        return COMPILE
    return "" if any(name in tried for name in COMPILED if name.endswith("-max")) else MODE


def lines_of_serving(folder: Path, slug: str) -> list[Line]:
    """An engine's workloads beside the fastest other engine on each."""
    path = path_of(slug, "serve", folder)
    if not path.exists():
        return []
    kept = read_json(path)
    machine, rows = kept["machine"], kept["rows"]
    lines = []
    for row in (row for row in rows if row["backend"] == OURS):
        peers = [other for other in on_the_same_work(rows, row) if not is_ours(other)]
        if not peers:
            continue
        peer = min(peers, key=lambda other: times_as_fast(row, other))
        ratio = times_as_fast(row, peer)
        verdict = EQUAL if round(ratio, 2) == 1 else FASTER if ratio > 1 else SLOWER
        where = "GPU" if machine["gpu"] else "CPU"
        lines.append(
            Line(
                f"serving on a {where}, {KINDS[row['unit']]}",
                WORKLOADS.get(row["case"], row["case"]),
                f"{figure(row)} {row['unit']}",
                f"{figure(peer)} {peer['unit']} ({peer['backend']})",
                ratio,
                verdict,
                not (is_current(row) and is_current(peer)),
                [date_of(either, machine) for either in (row, peer)],
            )
        )
    return lines


def date_of(row: dict[str, Any], machine: dict[str, Any]) -> str:
    return str(row.get("date") or machine.get("date", ""))[:10]


def measured_where(folder: Path, slugs: Iterable[str], runs: list[Result], lines: list[Line]) -> str:
    """Where, with what and between which days it was measured; each row of results/ has its commit."""
    machines = [run.machine for run in runs]
    machines += [read_json(path)["machine"] for slug in slugs if (path := path_of(slug, "serve", folder)).exists()]
    known = {}
    for machine in machines:
        versions = [f"{label} {machine[key]}" for label, key in VERSIONS.items() if machine.get(key)]
        known[machine_name(machine)] = ", ".join(versions)
    where = "; ".join(f"{name} ({versions})" for name, versions in known.items())
    dates = sorted({date for line in lines for date in line.dates if date})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "date not recorded"
    return f"_Measured on {where}, {when}; commits are in results/._"
