"""Bandwidth against access pattern: what a stride, a short row, an odd address or a small gathered row costs.

Each sweep moves the same number of elements at every setting and changes one thing about where they lie. Bandwidth
counts the elements that were wanted, read and written, so what a pattern fetches in vain shows as what it loses.
Without a GPU the definitions are measured, small and on one thread: a CPU's caches tell a similar story in other numbers.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilestack import ops
from tilestack.contract import Operator, backend
from tilestack.contract.registry import load_kernels
from tilestack.lab import results
from tilestack.lab.bench.peers import is_peer
from tilestack.lab.bench.roofs import measure_roofs
from tilestack.lab.bench.timing import Call, Candidate, measure
from tilestack.lab.machine import stamp
from tilestack.lab.report.page import SERIES, Section, colour, empty, plot, text, write_page
from tilestack.lab.stale import present_source

COMMAND = "tilestack bench memory"
RESULTS = "sweeps/memory"  # below the benchmark's files: patterns chosen to be bad have no place among its contests
ELEMENTS = {"cuda": 2**25, "cpu": 2**20}  # moved at every setting
SECONDS = {"cuda": 0.1, "cpu": 0.02}
BACKENDS = {"cuda": ("triton", "aten"), "cpu": ("torch",)}
DTYPE = torch.bfloat16

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One thing about a pattern that is varied, the operator that shows it, and what to learn from the curve."""

    name: str
    axis: str
    lesson: str
    operator: Operator
    settings: Sequence[int]
    arguments: Callable[[int, int, str], Arguments]  # setting, elements to move, device


def filled(*shape: int, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=DTYPE, device=device)  # written, so that every page is there


def every_stepth(step: int, elements: int, device: str) -> Arguments:
    return dict(x=filled(elements * step, device=device), step=step)


def every_second_row(length: int, elements: int, device: str) -> Arguments:
    return dict(x=filled(math.ceil(elements / length), 2, length, device=device)[:, 0])


def shifted(offset: int, elements: int, device: str) -> Arguments:
    return dict(x=filled(elements + offset, device=device)[offset:])


def shuffled_rows(length: int, elements: int, device: str) -> Arguments:
    rows = elements // length
    order = torch.randperm(rows, generator=torch.Generator(device).manual_seed(0), device=device)
    return dict(x=filled(rows, length, device=device), index=order)


SWEEPS = (
    Sweep(
        "stride",
        "elements from one read to the next",
        "Memory comes in sectors of 32 bytes, 16 elements here. Until the stride has reached that, each step further throws more of every sector away; beyond it, one sector is fetched for each element.",
        ops.strided_copy,
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        every_stepth,
    ),
    Sweep(
        "row length",
        "elements of a row",
        "Every second row is copied. A row is dense inside, so only its ends can waste anything: short rows pay, long rows do not.",
        ops.copy,
        [2**power for power in range(5, 21)],
        every_second_row,
    ),
    Sweep(
        "offset",
        "elements from an aligned address",
        "A thread moves 16 bytes at once only from an address that is a multiple of 16: 8 elements here. The compiler asks no more of a pointer than whether it is one; any other is read element by element.",
        ops.copy,
        range(16),
        shifted,
    ),
    Sweep(
        "gathered row",
        "elements of a row",
        "Rows are read in random order. From a few sectors a row on, order does not matter; below that, the rest of each sector is fetched in vain, and the index itself is no longer small.",
        ops.gather_rows,
        [2**power for power in range(13)],
        shuffled_rows,
    ),
)


def sweep_named(name: str) -> Sweep:
    return next(sweep for sweep in SWEEPS if sweep.name == name)


@dataclass(frozen=True)
class Point:
    """One candidate at one setting of a sweep; without figures where it failed, and then the note says why."""

    sweep: str
    setting: int
    backend: str
    time_us: float | None
    spread: float | None
    tb_per_s: float | None
    how: str
    note: str
    source: str = ""  # hash of the source that was measured, where that is ours


def bench_memory(device: str, save: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Measure every sweep: the machine, its roofs and a row per point. `save` is a folder of results to write to."""
    load_kernels()
    machine, points = stamp(device), []
    total = sum(len(sweep.settings) for sweep in SWEEPS)
    with Progress(console=console or Console(quiet=True), transient=True, disable=console is None) as progress:
        task = progress.add_task("memory", total=total)
        for sweep in SWEEPS:
            for setting in sweep.settings:
                progress.update(task, description=f"{sweep.name} {setting}", advance=1)
                points += measured_at(sweep, setting, device)
    roofs = measure_roofs(device).as_dict() if device == "cuda" else {}
    run = {"machine": machine, "roofs": roofs, "rows": [asdict(point) for point in points]}
    if save is not None:
        results.save(results.path_of(machine["slug"], RESULTS, save), run)
    return run


def write_sweeps_page(run: dict[str, Any], page: Path) -> Path:
    """Write a page with the plots of a run."""
    machine = run["machine"]
    facts = [
        ("measured on", results.machine_name(machine)),
        ("date, UTC", machine["date"][:16].replace("T", " ")),
    ]
    return write_page(page, "What a memory access costs", subtitle(machine), facts, "", [sweeps_section(run)])


def measured_at(sweep: Sweep, setting: int, device: str, elements: int | None = None) -> list[Point]:
    """The candidates of a device side by side on one setting."""
    build = functools.partial(sweep.arguments, setting, elements or ELEMENTS[device], device)

    def prepare(copies: int) -> list[Call]:
        return [functools.partial(sweep.operator, **build()) for _ in range(copies)]

    candidates = {name: Candidate(prepare, functools.partial(backend, name)) for name in BACKENDS[device]}
    _, moved = sweep.operator.cost(sweep.operator.bind(**build()))
    with torch.no_grad():
        timings = measure(candidates, moved, device, SECONDS[device])
    return [
        Point(
            sweep.name, setting, name, timing.time_us, timing.spread,
            moved / timing.time_us * 1e-6 if timing.time_us else None, timing.how, timing.note,
            present_source(sweep.operator.name, name),
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def load_sweeps(folder: Path, slug: str) -> dict[str, Any] | None:
    """The sweeps measured on a GPU, None when there are none."""
    path = results.path_of(slug, RESULTS, folder)
    return results.load(path) if path.exists() else None


def sweeps_are_current(run: dict[str, Any]) -> bool:
    """Whether every point of ours is of the present source."""
    ours = [point for point in points_of(run) if not is_peer(point.backend)]
    return all(point.source == present_source(sweep_named(point.sweep).operator.name, point.backend) for point in ours)


def points_of(run: dict[str, Any]) -> list[Point]:
    return [Point(**row) for row in run["rows"]]


def subtitle(machine: dict[str, Any]) -> str:
    what = "Triton kernels and PyTorch's own" if machine["gpu"] else "Plain PyTorch on a CPU, small sizes, no kernels"
    return f"{what}: the same elements, laid out ever more awkwardly."


def sweeps_section(run: dict[str, Any]) -> Section:
    """The sweeps as a part of a report: a curve per candidate, on a GPU with the copy roof above them."""
    lede = "Bandwidth of the elements that were wanted. Each plot changes one thing about where they lie in memory."
    if not run["machine"]["gpu"]:
        lede += " Measured on a CPU, where the definitions run; on a GPU the same command measures the kernels."
    roof = run["roofs"].get("copy_tb_per_s")
    body = "".join(
        f"<h3>{text(sweep.name.capitalize())}</h3><p>{text(sweep.lesson)}</p>{curves(sweep, points_of(run), roof)}"
        for sweep in SWEEPS
    )
    return Section("Memory patterns", lede, body)


def curves(sweep: Sweep, points: Iterable[Point], roof: float | None) -> str:
    mine = [point for point in points if point.sweep == sweep.name and point.tb_per_s is not None]
    if not mine:
        return empty("No measurements here. Run", COMMAND)
    data: list[dict[str, Any]] = []
    for index, name in enumerate(dict.fromkeys(point.backend for point in mine)):
        line = [point for point in mine if point.backend == name]
        tone = colour(SERIES[index % len(SERIES)])
        data.append(
            dict(
                type="scatter", mode="lines+markers", name=name, x=[str(point.setting) for point in line], y=[1e3 * (point.tb_per_s or 0) for point in line],
                hovertext=[f"{name}, {sweep.name} {point.setting}<br>{rate_in_words(point.tb_per_s)}" for point in line], hoverinfo="text",
                line=dict(color=tone, width=2), marker=dict(size=7, color=tone),
            )
        )  # fmt: skip
    if roof is not None:
        ends = [str(sweep.settings[0]), str(sweep.settings[-1])]
        data.append(
            dict(
                type="scatter", mode="lines", name=f"copy roof, {rate_in_words(roof)}", x=ends, y=[1e3 * roof] * 2, hoverinfo="skip",
                line=dict(color=colour("muted"), dash="dot", width=1.5),
            )
        )  # fmt: skip
    layout = dict(
        xaxis=dict(type="category", title=dict(text=sweep.axis)),
        yaxis=dict(title=dict(text="GB/s of wanted elements"), rangemode="tozero"),
    )
    return plot(data, layout, 340, f"bandwidth against {sweep.name}")


def sweep_tables(points: Sequence[Point]) -> list[Table]:
    """A table per sweep for the terminal, a column per candidate."""
    found = []
    for sweep in SWEEPS:
        mine = {(point.setting, point.backend): point for point in points if point.sweep == sweep.name}
        names = list(dict.fromkeys(name for _, name in mine))
        table = Table(title=f"{sweep.name}: {sweep.lesson}", title_justify="left")
        table.add_column(sweep.axis, justify="right")
        for name in names:
            table.add_column(name, justify="right")
        for setting in sweep.settings:
            table.add_row(str(setting), *(shown(mine.get((setting, name))) for name in names))
        found.append(table)
    return found


def shown(point: Point | None) -> str:
    if point is None or point.tb_per_s is None:
        return point.note if point else "–"
    return rate_in_words(point.tb_per_s)


def rate_in_words(tb_per_s: float | None) -> str:
    return (
        "–" if tb_per_s is None else f"{1e3 * tb_per_s:,.0f} GB/s" if tb_per_s >= 0.01 else f"{1e3 * tb_per_s:.1f} GB/s"
    )
