"""What `/metrics` tells Prometheus: the engine's state when it is asked, and how long requests and tokens took."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from tilestack.engine.remote import ServedEngine

FIRST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {  # name: (field of EngineStats, what it says)
    "requests_waiting": ("waiting", "Requests in the queue."),
    "requests_running": ("running", "Requests that are being answered."),
    "kv_pages": ("pages", "Pages of the KV cache."),
    "kv_pages_used": ("pages_used", "Pages of the KV cache that running requests hold."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_prompt_tokens": ("cached_tokens", "Tokens of prompts that were found in the prefix cache."),
    "completion_tokens": ("completion_tokens", "Tokens of answers; their rate is tokens/s."),
    "preemptions": ("preemptions", "Requests that lost their pages and were computed again."),
    "drafted_tokens": ("drafted", "Tokens that speculative decoding proposed."),
    "accepted_tokens": ("accepted", "Of these, those that were accepted."),
    "engine_requests": ("requests", "Requests that the engine took."),
}


class EngineState:
    """Reads the engine when Prometheus asks, so that a step of it pays nothing."""

    def __init__(self, engine: "ServedEngine"):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        for name, (field, about) in GAUGES.items():
            yield GaugeMetricFamily(f"tilestack_{name}", about, value=getattr(stats, field))
        share = stats.pages_used / stats.pages if stats.pages else 0.0
        yield GaugeMetricFamily("tilestack_kv_use", "Share of the KV cache that is in use.", value=share)
        hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily("tilestack_prefix_hit_rate", "Share of prompts found in the prefix cache.", value=hits)
        for name, (field, about) in COUNTERS.items():
            yield CounterMetricFamily(f"tilestack_{name}", about, value=getattr(stats, field))


class Metrics:
    """The measurements of one server."""

    def __init__(self, engine: "ServedEngine"):
        self.registry = CollectorRegistry()
        self.registry.register(EngineState(engine))  # type: ignore[arg-type]
        made: dict[str, Any] = {"registry": self.registry}
        self.answered = Counter("tilestack_http_requests", "Answers.", ["path", "status"], **made)
        self.first = Histogram("tilestack_time_to_first_token_seconds", "To the first token.", buckets=FIRST, **made)
        self.between = Histogram("tilestack_inter_token_seconds", "Between tokens.", buckets=BETWEEN, **made)
        self.whole = Histogram("tilestack_request_seconds", "To the end of the answer.", buckets=WHOLE, **made)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """The times of one request: to the first token, between those of each answer, and to the end."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.began = metrics, time.perf_counter()
        self.first: float | None = None
        self.last: dict[int, float] = {}

    def tokens(self, choice: int, count: int) -> None:
        """So many came at once for an answer."""
        now = time.perf_counter()
        before, self.last[choice] = self.last.get(choice), now
        if self.first is None:
            self.first = now - self.began
            self.metrics.first.observe(self.first)
        if before is not None:
            self.metrics.between.observe((now - before) / count)

    def ended(self) -> None:
        self.metrics.whole.observe(time.perf_counter() - self.began)
