"""What the result files say: runs, and the contests in them.

A run is one file, results/<gpu>/<name>.json: the machine, the roofs measured with it, and a row per candidate. The
candidates of one operator on one set of arguments form a contest: our fastest backend against the fastest peer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tilestack.contract import operators
from tilestack.lab.bench.peers import IN_FP8, MODES, is_peer, usual_code_tried
from tilestack.lab.labels import case_label
from tilestack.lab.results import load_all
from tilestack.lab.rows import EQUAL, FASTER, SLOWER, Stored, lender_of, times_faster, verdict
from tilestack.lab.stale import is_current

FASTEST = "fastest of ours"
DEFINITION = "torch"  # the definition run eagerly: shown, but no peer to be proud of beating
COMPILED_DEFINITION = [f"compile{mode}" for mode in MODES]


@dataclass(frozen=True)
class Result:
    """One run: the machine's stamp, the roofs measured on it, and a row per candidate."""

    machine: dict[str, Any]
    roofs: dict[str, Any]
    rows: list[Stored]

    @property
    def slug(self) -> str:
        return self.machine.get("slug") or "unknown"

    @property
    def bandwidth(self) -> float | None:
        return self.roofs.get("copy_tb_per_s")

    @property
    def rates(self) -> dict[str, float]:
        return {dtype: rate for dtype, rate in (self.roofs.get("matmul_tflops") or {}).items() if rate}


def results_under(folder: Path) -> list[Result]:
    """Every run stored as <folder>/<gpu>/<name>.json, in the order of their paths."""
    return [Result(run["machine"], run["roofs"], run["rows"]) for run in load_all(folder).values()]


@dataclass(frozen=True)
class Contest:
    """The candidates timed together on one operator, case, dtype and direction."""

    op: str
    case: str
    dtype: str
    direction: str
    rows: Sequence[Stored]
    run: Result

    @cached_property
    def timed(self) -> list[Stored]:
        return sorted((row for row in self.rows if row.get("time_us")), key=lambda row: row["time_us"])

    @property
    def ours(self) -> Stored | None:
        """The fastest of our backends, where one was timed; of those in another precision than any peer's only where none
        is in theirs."""
        return min(self.own, key=lambda row: row["backend"] in IN_FP8, default=None)

    @cached_property
    def own(self) -> list[Stored]:
        """Every backend of ours that was timed, fastest first."""
        return [row for row in self.timed if not is_peer(row["backend"]) and row["backend"] != DEFINITION]

    def only(self, backend: str) -> "Contest":
        """The same with one backend of ours alone beside the peers."""
        return replace(self, rows=[row for row in self.rows if row["backend"] == backend or is_peer(row["backend"])])

    @property
    def peer(self) -> Stored | None:
        """The fastest of the peers that were timed, unless it would be no win to be as fast."""
        fastest = next((row for row in self.timed if is_peer(row["backend"])), None)
        return None if fastest and self.is_no_usual_code(fastest) else fastest

    def is_no_usual_code(self, peer: Stored) -> bool:
        """Whether a peer that is no faster than ours is the definition, compiled, where people write something else that
        was not tried. Where it is faster, that is a loss all the same."""
        compiled = peer["backend"] in COMPILED_DEFINITION
        no_faster = self.ours is not None and self.ours["time_us"] <= peer["time_us"]
        return compiled and no_faster and not self.usual_code_tried

    @property
    def usual_code_tried(self) -> bool:
        """Whether what people write was timed or has failed, where that is not the definition."""
        return usual_code_tried(self.op, [row["backend"] for row in self.rows])

    @property
    def shown(self) -> Stored | None:
        """What stands for the contest in a plot: ours, or the fastest there is where nothing of ours ran."""
        return self.ours or next(iter(self.timed), None)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the fastest peer we are; below one is a loss."""
        return times_faster(self.ours["time_us"], self.peer["time_us"]) if self.ours and self.peer else None

    @property
    def verdict(self) -> str:
        """How we stand against the fastest peer, in a word; empty where nothing was compared."""
        return verdict(self.ours, self.peer) if self.ours and self.peer else ""

    @property
    def borrowed(self) -> str:
        """Whose kernel our fastest backend runs, where that is not ours."""
        return lender_of(self.ours) if self.ours else ""

    @property
    def stale(self) -> bool:
        """Whether our row was measured on an older source."""
        return self.ours is not None and not is_current(self.ours)

    @property
    def commit(self) -> str:
        """Where our row was measured."""
        return str((self.ours or {}).get("commit") or self.run.machine.get("commit") or "unknown")

    @property
    def name(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def label(self) -> str:
        """The case in words."""
        return case_label(self.op, self.case)

    def compute_bound(self, row: Stored) -> bool:
        """Whether arithmetic rather than memory sets this row's roof."""
        rate, bandwidth = self.run.rates.get(self.dtype) or self.run.rates.get("float32"), self.run.bandwidth
        if not (rate and bandwidth and row.get("tb_per_s")):
            return False
        return (row.get("tflops") or 0) / row["tb_per_s"] > rate / bandwidth


def contests(results: Iterable[Result]) -> list[Contest]:
    """Every contest of the runs by operator, case, dtype and direction; of runs that repeat one, the later date's."""
    found: dict[tuple[str, ...], Contest] = {}
    for run in sorted(results, key=lambda run: run.machine.get("date", "")):
        groups: dict[tuple[str, str, str, str], list[Stored]] = {}
        for row in run.rows:
            groups.setdefault((row["op"], row["case"], row["dtype"], row["direction"]), []).append(row)
        for key, rows in groups.items():
            found[run.slug, *key] = Contest(*key, rows, run)
    order = {"forward": 0, "backward": 1}
    names = [operator.name for operator in operators()]
    place = lambda op: (names.index(op) if op in names else len(names), op)
    # A case keeps the place its run gave it: sizes do not sort as text.
    return sorted(found.values(), key=lambda c: (place(c.op), c.dtype, order.get(c.direction, 2)))


@dataclass(frozen=True)
class Score:
    """How many of some contests were won, lost or neither; one on a borrowed kernel counts for nothing."""

    won: int
    lost: int
    equal: int

    @property
    def met(self) -> int:
        return self.won + self.lost + self.equal

    def __str__(self) -> str:
        return f"{self.won} of {self.met}" + (f", {self.equal} equal" if self.equal else "") if self.met else "–"


def score(verdicts: Iterable[str]) -> Score:
    verdicts = list(verdicts)
    return Score(*(verdicts.count(word) for word in (FASTER, SLOWER, EQUAL)))


def mean_ratio(values: Sequence[float]) -> float:
    """The mean of ratios that treats twice as fast and half as fast as opposites."""
    return geometric_mean(values)


@dataclass(frozen=True)
class Means:
    """How a backend of ours stands against the fastest peer of each case, over the cases of an operator."""

    op: str
    dtype: str
    direction: str
    backend: str  # or FASTEST, whichever of ours was fastest on a case
    met: int  # cases that a peer was timed on
    contests: Sequence[Contest]  # of these, those that the backend was timed on, with a kernel of ours

    @property
    def mean(self) -> float:
        return mean_ratio([contest.ratio for contest in self.contests if contest.ratio])

    @property
    def worst(self) -> Contest:
        return min(self.contests, key=lambda contest: contest.ratio or 0.0)

    @property
    def cases(self) -> str:
        """How many cases it is over, and of how many where the backend was not timed on all."""
        return str(self.met) if len(self.contests) == self.met else f"{len(self.contests)} of {self.met}"


def means(found: Iterable[Contest]) -> list[Means]:
    """The means of every backend of ours over several cases; where there are several backends, of the fastest first."""
    groups: dict[tuple[str, str, str], list[Contest]] = {}
    for contest in found:
        if contest.peer:
            groups.setdefault((contest.op, contest.dtype, contest.direction), []).append(contest)
    made = []
    for group, met in groups.items():
        backends = sorted({row["backend"] for contest in met for row in contest.own})
        ways = {name: [contest.only(name) for contest in met] for name in backends}
        if len(backends) > 1:
            ways = {FASTEST: met} | ways
        for name, over in ways.items():
            compared = [contest for contest in over if contest.ratio and not contest.borrowed]
            if len(compared) > 1:
                made.append(Means(*group, name, len(met), compared))
    return made


def rate(contest: Contest, row: Stored) -> str:
    """A row's rate in the unit of its roof: TFLOP/s where arithmetic is the limit, else TB/s."""
    if contest.compute_bound(row):
        return f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] >= 10 else f"{row['tflops']:.2f} TFLOP/s"
    return f"{row['tb_per_s']:.2f} TB/s" if row.get("tb_per_s") is not None else "–"


def method(rows: Iterable[Stored]) -> str:
    """How rows were timed, in words."""
    words = {
        "graph": "kernel time by CUDA-graph replay with cold caches",
        "events": "kernel time by CUDA events",
        "cpu": "processor time of one CPU thread",
    }
    used = dict.fromkeys(row.get("how") for row in rows)
    return " and ".join(words.get(how, str(how)) for how in sorted(filter(None, used))) or "method not recorded"
