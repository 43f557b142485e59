"""What a run comes to: throughput, latencies with their percentiles, and goodput, under `vllm bench serve`'s names.

TTFT   to the first token       TPOT   for a token after the first, the mean of a request
ITL    between two pieces       E2EL   to the end of the answer
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilestack.lab.serving.load.client import Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Objectives:
    """What a request must keep to, in milliseconds, to count towards goodput."""

    limits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objectives":
        """From ttft:200, tpot:50 and e2el:10000."""
        limits = {}
        for text in texts:
            name, _, value = text.partition(":")
            try:
                if name not in ("ttft", "tpot", "e2el"):
                    raise ValueError
                limits[name] = float(value)
            except ValueError:
                raise ValueError(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, not {text!r}") from None
        return cls(limits)

    def met(self, outcome: Outcome) -> bool:
        return all(1e3 * times_of(outcome)[name] <= limit for name, limit in self.limits.items())


def times_of(outcome: Outcome) -> dict[str, float]:
    return {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Between the two nearest, as numpy does it."""
    place = (len(sorted_values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (place - low)


def milliseconds(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """All that was measured of those that were answered, by name, from the least."""
    many = [outcome for outcome in outcomes if outcome.output_tokens > 1]
    found = {
        "ttft": [outcome.ttft for outcome in outcomes],
        "tpot": [outcome.tpot for outcome in many],
        "itl": [gap for outcome in outcomes for gap in outcome.itl],
        "e2el": [outcome.latency for outcome in outcomes],
    }
    return {name: sorted(1e3 * value for value in values) for name, values in found.items()}


def statistics_of(name: str, values: Sequence[float]) -> dict[str, float]:
    """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p50_ttft_ms, …"""
    if not values:
        values = [0.0]
    found = {f"mean_{name}_ms": statistics.fmean(values), f"median_{name}_ms": percentile(values, 50)}
    found[f"std_{name}_ms"] = statistics.pstdev(values)
    return found | {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """How many requests were under way at the busiest moment."""
    edges = [(outcome.start, 1) for outcome in outcomes] + [
        (outcome.start + outcome.latency, -1) for outcome in outcomes
    ]
    now = most = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


def summary(outcomes: Sequence[Outcome], objectives: Objectives | None = None) -> dict[str, Any]:
    """The figures of a run, and what they were made from."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    ends = [outcome.start + outcome.latency for outcome in answered]
    duration = max(ends, default=0.0) - min((outcome.start for outcome in outcomes), default=0.0)
    rate = lambda amount: amount / duration if duration > 0 else 0.0
    read, made = (sum(getattr(each, f"{kind}_tokens") for each in answered) for kind in ("input", "output"))
    found: dict[str, Any] = {
        "num_prompts": len(outcomes),
        "duration": duration,
        "completed": len(answered),
        "failed": len(failed),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": rate(len(answered)),
        "output_throughput": rate(made),
        "total_token_throughput": rate(read + made),
        "max_concurrent_requests": most_at_once(answered),
    }
    if objectives is not None and objectives.limits:
        found["request_goodput"] = rate(sum(map(objectives.met, answered)))
    for name, values in milliseconds(answered).items():
        found |= statistics_of(name, values)
    return found | {
        "input_lens": [outcome.input_tokens for outcome in answered],
        "output_lens": [outcome.output_tokens for outcome in answered],
        "start_times": [outcome.start for outcome in answered],
        "ttfts": [outcome.ttft for outcome in answered],
        "itls": [outcome.itl for outcome in answered],
        "errors": [outcome.error for outcome in failed],
    }
