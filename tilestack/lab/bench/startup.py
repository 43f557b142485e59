"""`tilestack bench startup`: how long a person waits before anything happens, beside what Python and PyTorch need alone.

Each line is a fresh process. Processor time is shown next to wall time, since it means the same on a busy machine; the
least of some repeats is kept, since whatever disturbs a start only ever adds to it.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.table import Table

STARTS = {
    "python": ["-c", "pass"],
    "tilestack --version": ["-m", "tilestack", "--version"],
    "tilestack --help": ["-m", "tilestack", "--help"],
    "import torch": ["-c", "import torch"],
    "import tilestack": ["-c", "import tilestack"],
    "from tilestack import ops": ["-c", "from tilestack import ops"],
}


@dataclass(frozen=True)
class Start:
    """The least wall time and processor time, in seconds, that one start took."""

    what: str
    wall: float
    processor: float


def time_start(arguments: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one Python process with these arguments, which must succeed."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with exit code {process.returncode}")
    return wall, used.ru_utime + used.ru_stime


def bench_startup(starts: dict[str, list[str]], repeats: int = 5) -> list[Start]:
    """Time starts by turns, so that what else the machine does falls on all of them alike; the first turn warms disks."""
    turns = [{what: time_start(arguments) for what, arguments in starts.items()} for _ in range(repeats + 1)][1:]
    least = lambda what, which: min(turn[what][which] for turn in turns)
    return [Start(what, least(what, 0), least(what, 1)) for what in starts]


def render_starts(found: list[Start]) -> Table:
    table = Table("start", title="Start-up", title_justify="left")
    for heading in ("wall", "processor"):
        table.add_column(heading, justify="right")
    for start in found:
        table.add_row(start.what, f"{start.wall:.2f} s", f"{start.processor:.2f} s")
    return table
