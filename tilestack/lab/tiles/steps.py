"""What a recording holds: launches, their programs, and the steps of each, one for every load and store.

Recording ─▶ Launch ─▶ Program ─▶ Step        the first of them, to be shown
               ├─▶ Tally                      sums over all steps of a kind on a region
               └─▶ touches                    the same by element, how often
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilestack.lab.proof.verify import Claim
from tilestack.lab.tiles.regions import Region

LOAD, STORE, ATOMIC = "load", "store", "atomic"
DESCRIPTOR = "descriptor "  # before load and store, where TMA moves a tile


class Line(NamedTuple):
    """A line of a kernel, or of a function that it calls."""

    file: str
    function: str
    begins: int  # the line of its `def`
    number: int


@dataclass(frozen=True)
class Step:
    """One load or store that a program executed."""

    kind: str
    lines: tuple[Line, ...]  # the kernel's, then that of the function called there, and so on
    region: int
    elements: np.ndarray  # by lane, of those that are on
    lanes: int
    masked: int  # lanes that are off
    outside: int  # lanes that are on, and in no tensor
    asked: int  # bytes, of all lanes that are on
    sectors: int
    fewest: int  # sectors that the elements could lie in


@dataclass
class Program:
    """One program of a launch, with the steps that are kept of it."""

    index: tuple[int, int, int]
    steps: list[Step] = field(default_factory=list)
    executed: int = 0


@dataclass
class Tally:
    """Sums over all steps of a kind on a region."""

    steps: int = 0
    lanes: int = 0
    masked: int = 0
    outside: int = 0
    asked: int = 0
    sectors: int = 0
    fewest: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        for name in ("lanes", "masked", "outside", "asked", "sectors", "fewest"):
            setattr(self, name, getattr(self, name) + getattr(step, name))


@dataclass
class Launch:
    """One launch of a kernel."""

    kernel: str
    begins: Line  # its `def`
    grid: tuple[int, int, int]
    regions: list[Region] = field(default_factory=list)
    touches: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)  # how often each element, by all programs
    programs: list[Program] = field(default_factory=list)  # those that are kept
    executed: int = 0
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)
    by_lines: dict[tuple[Line, ...], int] = field(default_factory=dict)  # the region last touched from there
    lanes_kept: int = 0
    full: bool = False

    def add_region(self, region: Region) -> int:
        """Take up another region; answers its number."""
        self.regions.append(region)
        return len(self.regions) - 1

    @property
    def reads(self) -> list[np.ndarray]:
        """Of each region, how often each element was loaded in whatever way."""
        return [self.times_touched(place, loaded=True) for place in range(len(self.regions))]

    @property
    def writes(self) -> list[np.ndarray]:
        """The same of what was stored."""
        return [self.times_touched(place, loaded=False) for place in range(len(self.regions))]

    def times_touched(self, region: int, loaded: bool) -> np.ndarray:
        ways = [
            each for (place, kind), each in self.touches.items() if (place, kind.endswith(LOAD)) == (region, loaded)
        ]
        return sum(ways, np.zeros(self.regions[region].size, np.int64))

    def add(self, step: Step, lanes_most: int) -> None:
        """Count a step of the last program, and keep it if it is among the first so many lanes."""
        self.by_lines[step.lines] = step.region
        self.tallies.setdefault((step.region, step.kind), Tally()).add(step)
        if (step.region, step.kind) not in self.touches:
            self.touches[step.region, step.kind] = np.zeros(self.regions[step.region].size, np.int64)
        touched, times = np.unique(step.elements, return_counts=True)
        self.touches[step.region, step.kind][touched] += times
        if len(self.programs) < self.executed:
            return
        program = self.programs[-1]
        program.executed += 1
        self.full = self.full or (self.lanes_kept > 0 and self.lanes_kept + step.lanes > lanes_most)
        if not self.full:
            self.lanes_kept += step.lanes
            program.steps.append(step)
        elif not program.steps:
            self.programs.pop()

    @property
    def what_is_kept(self) -> str:
        """What of it is kept to be shown, in words; empty where it is all."""
        last = self.programs[-1] if self.programs else None
        partly = last and last.executed > len(last.steps)
        if not last or (len(self.programs) == self.executed and not partly):
            return ""
        loads = f", of the last {len(last.steps)} of its {last.executed:,} loads and stores" if partly else ""
        return f"the first {len(self.programs):,} of {self.executed:,} programs{loads}"


@dataclass
class Recording:
    """A call and what its kernels did."""

    claim: Claim
    arguments: dict[str, Any]
    launches: list[Launch]
    error: str = ""
