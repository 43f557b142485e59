"""A row of results, one candidate on one case, and how it stands against the fastest peer.

A ratio is the fastest peer's time over the row's own, so above 1 is a win; a peer is held against the fastest of the
*other* peers, and has 1.0 when it is alone. A difference within the spread of either time, or one that two decimals do
not show, is no difference: the two are equal. Where candidates took turns and the ratio of each round is known, half of the
rounds must agree; if they lie too far apart to say so, the verdict is that it is unclear. Kernels, optimizers and training
steps all take their ratios from here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilestack.lab.bench.peers import BORROWED, is_peer

FASTER, SLOWER, EQUAL, SAME_KERNEL, UNCLEAR = "faster", "slower", "equal", "same kernel", "unclear"
WIDE = 0.1  # quartiles of a ratio that are further apart, around 1, do not say that two are equal

Stored = dict[str, Any]  # a row as it is kept on disk


@dataclass
class Row:
    op: str
    case: str
    dtype: str
    direction: str
    backend: str
    time_us: float | None = None
    spread: float | None = None
    host_us: float | None = None
    tb_per_s: float | None = None
    tflops: float | None = None
    roof_fraction: float | None = None
    ratio_to_best_peer: float | None = None
    verdict: str = ""  # against that peer: one of the words above
    peak_mib: float | None = None
    how: str = ""
    note: str = ""
    source: str = ""  # hash of the source that was measured, where that is ours
    lender: str | None = None  # whose kernel ran, empty where it is the backend's own; None where nobody noted it
    cosine: float | None = None  # with what the result stands for, of operators that quantise (quality.py)
    relative_error: float | None = None  # the same

    def set_rates(self, flops: float, moved: float, floor_us: float) -> None:
        """Fill in what follows from the time for so much arithmetic and so many bytes, which take `floor_us` at the roof."""
        assert self.time_us
        self.tb_per_s, self.tflops = moved / self.time_us * 1e-6, flops / self.time_us * 1e-6
        self.roof_fraction = floor_us / self.time_us

    def as_dict(self) -> Stored:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Stored) -> "Row":
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


def set_ratios(rows: Sequence[Row]) -> None:
    """Fill in each row's ratio and verdict among the rows of one comparison."""
    for row in rows:
        if row.time_us is None:
            continue
        others = [peer for peer in rows if is_peer(peer.backend) and peer is not row and peer.time_us is not None]
        best = min(others, key=lambda peer: peer.time_us or 0.0, default=None)
        row.ratio_to_best_peer = (
            times_faster(row.time_us, best.time_us) if best else 1.0 if is_peer(row.backend) else None
        )
        row.verdict = verdict(row.as_dict(), best.as_dict()) if best else ""


def times_faster(time_us: float, peer_us: float | None) -> float | None:
    """How many times faster than a peer; even where neither runs anything, and None where only the peer runs something."""
    if not time_us:
        return None if peer_us else 1.0
    return (peer_us or 0.0) / time_us


def lender_of(row: Stored) -> str:
    """Whose kernel a row measured, where that is not the backend's own."""
    noted = row.get("lender")
    return BORROWED.get((row["op"], row["backend"], row["direction"]), "") if noted is None else noted


def verdict(ours: Stored, peer: Stored) -> str:
    """How a timed row stands against a timed peer, in a word."""
    if lender_of(ours):
        return SAME_KERNEL
    if quartiles := ours.get("ratio_quartiles"):
        return verdict_of_rounds(*quartiles)
    times, against = (ours["time_us"], peer["time_us"]), times_faster(ours["time_us"], peer["time_us"])
    noise = max(row["time_us"] * (row.get("spread") or 0.0) for row in (ours, peer))
    if abs(times[0] - times[1]) <= noise or (against is not None and round(against, 2) == 1):
        return EQUAL
    return FASTER if times[0] < times[1] else SLOWER


def verdict_of_rounds(low: float, high: float) -> str:
    """How a candidate stands against a peer when half of the rounds have a ratio between low and high."""
    if round(low, 2) > 1 or round(high, 2) < 1:
        return FASTER if low > 1 else SLOWER
    return EQUAL if high - low <= WIDE else UNCLEAR
