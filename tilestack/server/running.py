"""A request while the engine works on it: its prompts' streams as one, timed, and ended when anything goes wrong.

However a request ends (an answer, an error, a client that left, a server that ends), `cancel` is called, and the engine
holds nothing of it afterwards.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from tilestack.engine import QueueFull
from tilestack.engine.outputs import Completion, Delta, Usage
from tilestack.engine.params import SamplingParams
from tilestack.server.errors import ApiError, ending, refuse
from tilestack.server.metrics import Metrics, Stopwatch
from tilestack.server.pacing import Pace, paced

if TYPE_CHECKING:
    from tilestack.engine.remote import ServedEngine

Prompt = tuple[list[int], SamplingParams]


class Running:
    """The answers to the prompts of one request. Those of the second prompt are numbered after those of the first."""

    def __init__(
        self,
        engine: "ServedEngine",
        metrics: Metrics,
        prompts: Sequence[Prompt],
        *,
        seconds: float,
        until: float | None = None,
        retry: int,
        pace: Pace,
    ):
        self.engine, self.prompts, self.seconds, self.retry = engine, prompts, seconds, retry
        self.pace = pace  # of events
        self.deadline = asyncio.get_running_loop().time() + seconds if until is None else until
        self.watch = Stopwatch(metrics)
        self.streams: list[Any] = []

    @property
    def choices(self) -> int:
        return sum(params.n for _, params in self.prompts)

    def submit(self, id: str, **options: Any) -> None:
        """Hand all prompts to the engine, or none."""
        self.engine.admission.check_fits(sum(params.drawn for _, params in self.prompts))
        try:
            for number, (ids, params) in enumerate(self.prompts):
                self.streams.append(self.engine.submit(ids, params, id=f"{id}-{number}", **options))
        except Exception as problem:
            self.cancel()
            self.streams.clear()
            if not isinstance(problem, QueueFull):
                raise
            raise ApiError(
                429,
                f"too many requests at once: {problem}",
                code="queue_full",
                headers={"Retry-After": str(self.retry)},
            ) from problem

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes of all prompts, in the order it comes; an answer that fails ends the request."""
        async for delta in paced(self.streams[0], self.pace) if len(self.streams) == 1 else self._mixed():
            if delta.finish == "refused":
                raise refuse(delta.error or "the answer cannot go on as it was asked for", code="structure_failed")
            if delta.finish == "error":
                raise ApiError(500, delta.error or "the model failed on this request", code="model_error")
            if delta.finish == "cancelled":
                raise ending()
            if delta.ids:
                self.watch.tokens(delta.choice, len(delta.ids))
            yield delta
        self.watch.ended()

    async def _numbered(self, number: int, first: int) -> AsyncIterator[Delta]:
        async for delta in paced(self.streams[number], self.pace):
            yield delta._replace(choice=delta.choice + first) if first else delta

    async def _mixed(self) -> AsyncIterator[Delta]:
        ready: asyncio.Queue[Delta | None] = asyncio.Queue()
        failures: list[BaseException] = []

        async def pump(number: int, first: int) -> None:
            try:
                async for delta in self._numbered(number, first):
                    ready.put_nowait(delta)
            except Exception as problem:
                failures.append(problem)
            finally:
                ready.put_nowait(None)

        firsts = [sum(params.n for _, params in self.prompts[:number]) for number in range(len(self.prompts))]
        pumps = [asyncio.create_task(pump(number, first)) for number, first in enumerate(firsts)]
        try:
            for _ in pumps:
                while (delta := await ready.get()) is not None:
                    yield delta
                if failures:
                    raise failures[0]
        finally:
            for task in pumps:
                task.cancel()

    async def completions(self) -> list[Completion]:
        """All answers, when the last has ended."""
        found = [Completion() for _ in range(self.choices)]
        try:
            async with asyncio.timeout_at(self.deadline):
                async for delta in self.deltas():
                    found[delta.choice].add(delta)
        except TimeoutError:
            raise self.late() from None
        finally:
            self.cancel()
        return found

    def late(self) -> ApiError:
        return ApiError(504, f"the answer took longer than {self.seconds:g} seconds", code="timeout")

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    @property
    def usage(self) -> Usage:
        each = [stream.usage for stream in self.streams]
        return Usage(sum(u.prompt for u in each), sum(u.cached for u in each), sum(u.completion for u in each))


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
