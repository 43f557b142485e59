"""What launchers ask Triton for, before anything is compiled, and which of it is worth compiling.

Triton compiles a kernel anew for every set of constants, argument types and alignments, and hundreds of those differ in
nothing that a gate could see. What can make a kernel fail is its largest tile, and what it does one way or another: a branch
taken, an argument left out, its type, odd sizes. Few launches have all of that between them:

    launches of a kernel                     chosen
    128x256  bias     gelu   whole vectors   the largest
    128x128  bias     gelu   whole vectors
    128x128  no bias  none   odd sizes       the one with most of what is missing: no bias, no activation, odd
    128x128  no bias  gelu   odd sizes
    64x64    no bias  relu   whole vectors   relu is missing still
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A kernel as a launcher asks for it: everything that Triton would compile it for."""

    kernel: str
    key: str  # equal for equal compilations
    types: dict[str, str] = field(compare=False)  # of arguments that are no constants
    constants: dict[str, Any] = field(compare=False)  # arguments too that were left out, or are 1
    odd: set[str] = field(compare=False)  # pointers and sizes that 16 does not divide
    num_warps: int = field(compare=False)
    num_stages: int = field(compare=False)

    @property
    def size(self) -> int:
        """The product of its numbers, among which are the sides of tiles; only good for comparing launches of a kernel."""
        sizes = [value for value in self.constants.values() if type(value) is int]
        return math.prod(max(number, 1) for number in (*sizes, self.num_warps, self.num_stages))

    @property
    def choices(self) -> set[tuple[str, Any]]:
        """What it does one way or another; of a number only that there is one."""
        given = lambda value: value if isinstance(value, bool | str | None) else "a number"
        constants = {(name, given(value)) for name, value in self.constants.items()}
        types = {(name, re.sub(r"\[.*", "", described)) for name, described in self.types.items()}  # without shapes
        return constants | types | {("odd", bool(self.odd))}


def largest_launches(launches: Iterable[Launch]) -> set[Launch]:
    """The largest launch of each kernel."""
    return {max(alike, key=lambda launch: launch.size) for alike in by_kernel(launches).values()}


def cover(launches: Iterable[Launch]) -> set[Launch]:
    """Few launches of each kernel: the largest, and with it what has every choice that any launch of the kernel has."""
    chosen = set()
    for alike in by_kernel(launches).values():
        newest = max(alike, key=lambda launch: launch.size)
        missing = set[Any]().union(*(launch.choices for launch in alike))
        chosen.add(newest)
        while missing := missing - newest.choices:
            newest = max(alike, key=lambda launch: (len(missing & launch.choices), launch.size))
            chosen.add(newest)
    return chosen


def by_kernel(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """Launches by the kernel they are of, equal ones once."""
    found: dict[str, list[Launch]] = defaultdict(list)
    for launch in dict.fromkeys(launches):
        found[launch.kernel].append(launch)
    return found
