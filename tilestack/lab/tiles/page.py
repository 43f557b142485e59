"""The page that shows a recording: self-contained, from page.html, with everything that was recorded as JSON in it.

A tensor is drawn as rows and columns of cells. Where it has more elements than a screen shows, a cell is a block of them; a
line of numbers is wrapped. How often elements were read and written comes as the mean of each cell, over all programs; steps
come element by element, as far as they are kept:

    [start, length, count, pitch]      `count` runs of `length` elements, `pitch` apart: a tile of a matrix is one such group
"""

import html
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilestack.files import write_text_whole
from tilestack.lab.report.page import COLOURS
from tilestack.lab.tiles.counts import as_json, call_in_words, counts_of, total_in_words
from tilestack.lab.tiles.regions import Region
from tilestack.lab.tiles.steps import Launch, Line, Recording, Step
from tilestack.lab.units import in_bytes

PAGE = Path(__file__).with_name("page.html")
MARK = b'<script type="application/json" id="data">'  # which is in all pages
MOST_ROWS, MOST_COLUMNS = 192, 320  # of cells
LONGEST_LINE = 64  # numbers in a row that are not wrapped
LAUNCHES_SHOWN = 32


@dataclass(frozen=True)
class Grid:
    """How a tensor is drawn: its rows and columns, and how many of each are a cell."""

    rows: int
    columns: int
    row_block: int
    column_block: int

    @classmethod
    def of(cls, region: Region) -> "Grid":
        lead, last = math.prod(region.shape[:-1]), region.shape[-1] if region.shape else 1
        if last == 1 or lead == 1:
            size = region.size
            last = size if size <= LONGEST_LINE else min(max(1 << round(math.log2(size) / 2 + 1), 32), size)
            lead = -(-size // max(last, 1))
        return cls(lead, last, max(-(-lead // MOST_ROWS), 1), max(-(-last // MOST_COLUMNS), 1))

    def means(self, counts: np.ndarray) -> np.ndarray:
        """The mean of each cell, row by row."""
        if not counts.size:
            return np.zeros(0)
        starts = [np.arange(0, size, block) for size, block in ((self.rows, self.row_block), (self.columns, self.column_block))]  # fmt: skip
        summed = lambda numbers: np.add.reduceat(
            np.add.reduceat(np.pad(numbers, (0, self.rows * self.columns - len(numbers))).reshape(self.rows, -1), starts[0], 0),
            starts[1], 1,
        )  # fmt: skip
        return (summed(counts) / np.maximum(summed(np.ones_like(counts)), 1)).reshape(-1)


def write_tiles_page(path: Path, recording: Recording) -> Path:
    """Write the page; its folder is made. What is there already is replaced where it is such a page, and else refused."""
    if path.is_file() and (there := path.read_bytes()) and MARK not in there:
        raise ValueError(f"{path} is there already, and is not a page of tiles; move it away, or name another file")
    themes = ["".join(f"--{name}:{pair[dark]};" for name, pair in COLOURS.items()) for dark in (0, 1)]
    values = dict(
        title=html.escape(call_in_words(recording)),
        light=themes[0],
        dark=themes[1],
        data=json.dumps(page_data(recording), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, re.sub(r"\{\{(\w+)\}\}", lambda named: values[named[1]], PAGE.read_text(encoding="utf-8")))
    return path


def page_data(recording: Recording) -> dict[str, Any]:
    """All that the page shows."""
    shown = recording.launches[:LAUNCHES_SHOWN]
    functions: dict[tuple[str, str, int], int] = {}
    places: dict[tuple[Line, ...], int] = {}
    for launch in shown:
        functions.setdefault(launch.begins[:3], len(functions))
        for step in (step for program in launch.programs for step in program.steps):
            places.setdefault(step.lines, len(places))
            for line in step.lines:
                functions.setdefault(line[:3], len(functions))
    more = len(recording.launches) - len(shown)
    counts = counts_of(recording)
    return as_json(recording) | dict(
        title=call_in_words(recording),
        total=total_in_words(recording),
        more=f"the first {len(shown)} of {len(recording.launches)} launches are shown" if more else "",
        counts=[asdict(count) | dict(efficiency=count.efficiency, asked=in_bytes(count.asked), distinct=in_bytes(count.distinct)) for count in counts],
        functions=[source_of(*function) for function in functions],
        places=[[[functions[line[:3]], line.number] for line in lines] for lines in places],
        launches=[launch_data(launch, places) | dict(source=functions[launch.begins[:3]]) for launch in shown],
    )  # fmt: skip


def launch_data(launch: Launch, places: dict[tuple[Line, ...], int]) -> dict[str, Any]:
    return dict(
        kernel=launch.kernel,
        grid=list(launch.grid),
        executed=launch.executed,
        kept=launch.what_is_kept,
        regions=[
            region_data(region, reads, writes)
            for region, reads, writes in zip(launch.regions, launch.reads, launch.writes, strict=True)
        ],
        programs=[
            dict(index=list(program.index), steps=[step_data(step, places) for step in program.steps])
            for program in launch.programs
        ],
    )


def region_data(region: Region, reads: np.ndarray, writes: np.ndarray) -> dict[str, Any]:
    grid = Grid.of(region)
    return asdict(grid) | dict(
        name=region.name,
        dtype=region.dtype,
        shape=list(region.shape),
        size=region.size,
        bytes=in_bytes(region.size * region.itemsize),
        reads=run_lengths(grid.means(reads)),
        writes=run_lengths(grid.means(writes)),
        most_read=int(reads.max(initial=0)),
        most_written=int(writes.max(initial=0)),
    )


def step_data(step: Step, places: dict[tuple[Line, ...], int]) -> list[Any]:
    """As short as it can be: there are many."""
    groups = [number for group in groups_of(step.elements) for number in group]
    sums = step.lanes, step.masked, step.outside, step.asked, step.sectors, step.fewest
    return [step.kind, step.region, places[step.lines], groups, *sums]


def groups_of(elements: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Numbers of elements, each once, as groups of runs: (start, length, count, pitch)."""
    numbers = np.unique(elements)
    if not numbers.size:
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate([[0], breaks])].tolist()
    lengths = np.diff(np.concatenate([[0], breaks, [len(numbers)]])).tolist()
    place = 0
    while place < len(starts):
        start, length, count, pitch = starts[place], lengths[place], 1, 0
        while place + count < len(starts) and lengths[place + count] == length:
            distance = starts[place + count] - starts[place + count - 1]
            if pitch not in (0, distance):
                break
            pitch, count = distance, count + 1
        yield start, length, count, pitch
        place += count


def run_lengths(values: np.ndarray) -> list[float]:
    """Values with how often each stands there in a row: [value, times, value, times, …]."""
    rounded = np.round(values, 3)
    if not rounded.size:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(rounded)) + 1])
    times = np.diff(np.concatenate([starts, [len(rounded)]]))
    return [number for pair in zip(rounded[starts].tolist(), times.tolist(), strict=True) for number in pair]


def source_of(file: str, function: str, begins: int) -> dict[str, Any]:
    """The text of a function, from its `def` on; empty where the file cannot be read any more."""
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[begins - 1 :]
        text = "".join(inspect.getblock(lines))
    except (OSError, UnicodeDecodeError):
        text = ""
    here = Path.cwd()
    shown = str(path.relative_to(here)) if path.is_relative_to(here) else path.name
    return dict(file=shown, name=function, begins=begins, lines=text.rstrip("\n").split("\n"))
