"""Training steps of one model: ours, eager, compiled and in fp8, beside a loop in plain PyTorch, and transformers eager,
compiled, and with Liger's kernels (train_steps.py).

Each candidate runs in a process of its own, so that its peak memory is its own and nothing is patched for the others. That
they do the same work is seen in their losses. On a GPU, which the candidate has to itself, steps are timed by events between
them: nothing waits for the GPU until all are done. On a CPU the candidates take their steps in turn (train_turns.py).

    python -m tilestack.lab.training.bench_train '{"candidate": "tilestack", "config": {…}, …}'      one candidate, as JSON
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from tilestack.lab.bench.peers import IN_FP8, OF_TRAINING, importable, is_peer
from tilestack.lab.bench.timing import median_and_spread
from tilestack.lab.labels import case_label
from tilestack.lab.rows import UNCLEAR, Row, Stored, set_ratios, verdict_of_rounds
from tilestack.lab.stale import TRAINING, is_current, present_source
from tilestack.lab.training.train_steps import Work, step_of, write_weights
from tilestack.lab.training.train_turns import failure_note, in_turn, ratio_quartiles

GRAPH = "tilestack-graph"
OURS = ("tilestack", GRAPH, "tilestack-compile", *IN_FP8)
CANDIDATES = (*OURS, *OF_TRAINING)
PUBLISHED = {"qwen3-0.6b": (8, 32), "qwen3-moe-8x": (8,), "qwen3-1.7b": (8,)}  # recipes and their micro-batches
SAME_LOSS = 0.01  # of each other, at the first step; rounding in bfloat16 is far below, other work far above


def measure_steps(candidate: str, work: Work) -> dict[str, Any]:
    """Time the steps of a candidate in this process, after some that are not timed; nothing waits in between."""
    step = step_of(candidate, work)
    clock = OnGpu() if work.device == "cuda" else OnHost()
    losses = [step() for _ in range(work.warmup)]
    clock.start()
    for _ in range(work.steps):
        losses.append(step())
        clock.lap()
    seconds, spread = median_and_spread(clock.laps())
    first, last = losses[0].item(), losses[-1].item()
    return {"seconds": seconds, "spread": spread, "peak_mib": clock.peak_mib(), "first_loss": first, "last_loss": last}


class OnHost:
    """Laps on the host's clock."""

    def start(self) -> None:
        self.marks = [time.perf_counter()]

    def lap(self) -> None:
        self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        return [end - start for start, end in itertools.pairwise(self.marks)]

    def peak_mib(self) -> float | None:
        return None


class OnGpu:
    """Laps by events in the GPU's own queue, read when all are over; and the peak of memory from the first step on, since
    later ones replay a graph in memory that was set aside when it was captured."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def start(self) -> None:
        torch.cuda.synchronize()
        self.marks: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def laps(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in itertools.pairwise(self.marks)]

    def peak_mib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**20


def step_candidates(candidates: Sequence[str] | None, work: Work) -> list[str]:
    """The candidates that can do the work here, or an error for one that was asked for and does not exist."""
    if unknown := [name for name in candidates or () if name not in CANDIDATES]:
        raise ValueError(f"no candidate {', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    if candidates:
        return list(candidates)
    needs = {
        "transformers": "transformers",
        "transformers-compile": "transformers",
        "transformers-liger": "liger_kernel",
    }
    module_of = lambda name: needs.get(name, "torch")
    able = {GRAPH: work.device == "cuda"} | {name: fits_fp8(work, name) for name in IN_FP8}
    return [name for name in CANDIDATES if importable(module_of(name)) and able.get(name, True)]


def fits_fp8(work: Work, candidate: str) -> bool:
    """Whether the device has fp8, and the model products of sizes that can be made in it: in its layers, or its head too."""
    from tilestack import models
    from tilestack.models.shapes import shapes_alone
    from tilestack.train import fp8

    if fp8.lacks_fp8(torch.device(work.device)):
        return False
    with shapes_alone():
        model = models.Decoder(models.ModelConfig.from_hf(work.config))
    has_head = candidate != "tilestack-fp8-head" or fp8.suits(model.head_weight)
    return has_head and any(fp8.takes_fp8(module) for module in model.layers.modules())


def bench_train(
    work: Work,
    candidates: Sequence[str] | None = None,
    say: Callable[[str], Any] = lambda words: None,
    timeout: float = 600,
) -> list[Stored]:
    """A row for every candidate on the same work; one that fails has a note instead of figures.

    Beside what every row has, these hold tokens a second, the losses of the first and the last step, and who was tried.
    """
    rows, found = [], {}
    tried = step_candidates(candidates, work)
    with tempfile.TemporaryDirectory() as folder:
        same = write_weights(work, Path(folder))
        if work.device == "cpu":
            say(f"{', '.join(tried)} in turn, {work.case}")
            found = in_turn(tried, same, timeout)
        else:
            for candidate in tried:
                say(f"{candidate}, {work.case} …")
                found[candidate] = figures = apart(candidate, same, timeout)
                say(f"  {work.tokens / figures['seconds']:,.0f} tokens/s" if "seconds" in figures else "  no figure")
    refuse_other_work(found)
    for candidate, figures in found.items():
        row = Row(
            TRAINING, work.case, work.dtype, "step", candidate, how=how_timed(work),
            note=figures.get("note", ""), source=present_source(TRAINING, candidate),
        )  # fmt: skip
        if "seconds" in figures:
            row.time_us, row.spread, row.peak_mib = figures["seconds"] * 1e6, figures["spread"], figures["peak_mib"]
        rows.append(row)
    set_ratios(rows)
    quartiles = quartiles_against_best_peer(rows, found)
    return [
        row.as_dict()
        | {"tokens_per_s": work.tokens / row.time_us * 1e6 if row.time_us else None, "tried": tried}
        | {name: found[row.backend].get(name) for name in ("first_loss", "last_loss")}
        | quartiles.get(row.backend, {})
        for row in rows
    ]


def how_timed(work: Work) -> str:
    if work.device == "cpu":
        return f"processor time of whole steps on one thread, taken in turn, at least {work.steps} each"
    return "time of whole steps, queued one after another"


def quartiles_against_best_peer(rows: Sequence[Row], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of candidates that took their steps in turn, the ratio round by round: its median and where half of them lie."""
    timed = [row for row in rows if row.time_us and len(found[row.backend].get("laps", ())) > 1]
    timed.sort(key=lambda row: row.time_us or 0.0)
    quartiles = {}
    for row in timed:
        peer = next((other for other in timed if is_peer(other.backend) and other is not row), None)
        if peer is not None:
            low, middle, high = ratio_quartiles(found[row.backend]["laps"], found[peer.backend]["laps"])
            quartiles[row.backend] = {"ratio_to_best_peer": middle, "ratio_quartiles": [low, high], "verdict": verdict_of_rounds(low, high)}  # fmt: skip
    return quartiles


def refuse_other_work(found: dict[str, dict[str, Any]]) -> None:
    """Take the figures from a candidate whose first loss is not that of the others: it did something else."""
    losses = {name: figures["first_loss"] for name, figures in found.items() if "first_loss" in figures}
    if not losses:
        return
    usual = median(losses.values())
    for name, loss in losses.items():
        if not abs(loss - usual) <= SAME_LOSS * abs(usual):
            found[name] = {"note": f"not the same work: its first loss is {loss:.4f}, of the others {usual:.4f}"}


def stale_works(works: Sequence[Work], rows: Sequence[Stored], candidates: Sequence[str] | None = None) -> list[Work]:
    """The works without a row of the present source of each of ours that was asked for, or where none was of each that has
    a row."""
    mine = [row for row in rows if row["op"] == TRAINING and row["backend"] in OURS]
    named = lambda work, those: {
        row["backend"] for row in those if (row["case"], row["dtype"]) == (work.case, work.dtype)
    }
    current = [row for row in mine if is_current(row)]
    wanted = lambda work: set(candidates or ()) & set(OURS) or named(work, mine)
    return [work for work in works if not named(work, current) or not wanted(work) <= named(work, current)]


def apart(candidate: str, work: Work, timeout: float) -> dict[str, Any]:
    """Measure a candidate in a process of its own."""
    spec = json.dumps({"candidate": candidate, **asdict(work)})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilestack.lab.training.bench_train", spec],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"note": f"not done after {timeout:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"note": failure_note(done.stderr, done.returncode)}


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "–",
    "step": lambda row: f"{row['time_us'] / 1e3:,.1f} ms" if row["time_us"] else "–",
    "peak\nGiB": lambda row: f"{row['peak_mib'] / 1024:.1f}" if row["peak_mib"] else "–",
    "× best peer": lambda row: ratio_with_spread(row),
    "loss": lambda row: f"{row['first_loss']:.2f} → {row['last_loss']:.2f}" if row["first_loss"] is not None else "–",
}


def render_training_steps(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per candidate; what is nothing in every line is left out, since a terminal is narrow."""
    table = Table(title="training steps", title_justify="left", caption=explanation(rows), caption_justify="left")
    table.add_column("model, micro-batch", overflow="fold")
    table.add_column("candidate", no_wrap=True)
    columns = {heading: cell for heading, cell in COLUMNS.items() if any(cell(row) != "–" for row in rows)}
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    noted = any(row["note"] for row in rows)
    if noted:
        table.add_column("note", overflow="fold")
    for row in rows:
        shown = [cell(row) for cell in columns.values()]
        notes = [escape(row["note"])] if noted else []
        table.add_row(case_label(TRAINING, row["case"]), row["backend"], *shown, *notes)
    return table


def ratio_with_spread(row: dict[str, Any]) -> str:
    """The ratio, and of steps taken in turn also where half of the rounds lie and what that says."""
    if not row["ratio_to_best_peer"]:
        return "–"
    low, high = row.get("ratio_quartiles") or (None, None)
    said = f" {row['verdict']}" if row["backend"] in OURS else ""
    return f"{row['ratio_to_best_peer']:.2f}×" + (f"{said}\n{low:.2f}–{high:.2f}" if low else "")


def explanation(rows: Sequence[dict[str, Any]]) -> str | None:
    """How to read the figures of steps that were taken in turn."""
    in_rounds = [row for row in rows if row.get("ratio_quartiles")]
    if not in_rounds:
        return None
    how = "; ".join(dict.fromkeys(row["how"] for row in in_rounds))
    words = f"{how}. A ratio is the median of the rounds; below it, where half of them lie."
    if any(row["verdict"] == UNCLEAR for row in in_rounds if row["backend"] in OURS):
        words += " Unclear: the rounds differ too much to say who is faster; try again when less is running here."
    return words


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure_steps(asked.pop("candidate"), Work(**asked))))
