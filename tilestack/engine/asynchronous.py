"""The engine for programs that wait: requests stream into any asyncio loop.

    async with AsyncEngine.load("smollm2") as engine:
        stream = engine.submit(ids, SamplingParams(max_tokens=64))
        async for delta in stream:
            print(delta.text, end="")

A thread takes the steps (thread.py), and leaves deltas where the loop finds them (delta_queue.py).
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilestack.data import Tokenizer
from tilestack.engine.admission import Admission
from tilestack.engine.delta_queue import DeltaQueue
from tilestack.engine.engine import Engine, EngineStats, News
from tilestack.engine.outputs import Delta, TokenLogprob, Usage
from tilestack.engine.params import SamplingParams
from tilestack.engine.sequence import Request
from tilestack.engine.settings import EngineSettings
from tilestack.engine.structure import Structures
from tilestack.engine.thread import EngineClosed as EngineClosed
from tilestack.engine.thread import EngineThread

log = logging.getLogger(__name__)


class Stream:
    """What comes of a request: iterate for its deltas. Leaving an `async with` block cancels what is left of it."""

    def __init__(self, engine: Any, request: Request, loop: asyncio.AbstractEventLoop):
        self.engine, self.request = engine, request
        self.deltas = DeltaQueue(loop)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self.read()

    async def read(self) -> AsyncIterator[Delta]:
        while await self.deltas.something():
            yield self.deltas.come.popleft()  # one by one: who stops reading may go on later

    def cancel(self) -> None:
        """End the request, at any moment."""
        if not self.deltas.ended:
            self.engine.cancel(self.request)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    @property
    def usage(self) -> Usage:
        return self.engine.engine.usage(self.request)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        return self.request.prompt_logprobs if self.request.params.prompt_logprobs is not None else None


class AsyncEngine(EngineThread):
    """What a server asks; `RemoteEngine` (remote.py) is the same for an engine in another process."""

    streams: dict[Request, Stream]
    ending = False  # whether who holds the engine wants its server to end

    def __init__(self, engine: Engine, model_name: str = ""):
        super().__init__(engine)
        self.model_name = model_name
        self.numbers = itertools.count()

    @classmethod
    def load(cls, model: str | Path, settings: EngineSettings | None = None) -> "AsyncEngine":
        return cls(Engine.load(model, settings), Path(model).name)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def weights(self) -> str:
        return self.engine.weights

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.engine.adapter_names

    @property
    def admission(self) -> Admission:
        return self.engine.admission

    @property
    def structures(self) -> Structures:
        return self.engine.structures

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def __aenter__(self) -> "AsyncEngine":
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        salt: str = "",
        pooling: str | None = None,
    ) -> Stream:
        """Queue a request from within a loop; raises RequestError, QueueFull or EngineClosed at once. With `pooling` its only
        delta holds the prompt as a vector."""
        params = params or SamplingParams()
        id = id or f"request-{next(self.numbers)}"
        request = Request(id, list(prompt), params, priority, adapter, salt, pooling)
        self.engine.admission.check(request)
        self.engine.check_queue(params.drawn, self.entering)
        stream = Stream(self, request, asyncio.get_running_loop())

        def enter() -> list[News]:
            self.streams[request] = stream
            try:
                return self.enter(request)
            finally:
                with self.lock:  # not before it waits, lest others take its place
                    self.entering -= params.drawn

        self.leave(enter, params.drawn)
        return stream

    async def close(self, drain: float = 0.0) -> None:
        """Take no more requests, give those that run so many seconds, cancel the rest, and end the thread."""
        with self.lock:
            self.closing = True
        loop = asyncio.get_running_loop()
        ends = loop.time() + drain
        while (self.streams or self.entering) and loop.time() < ends and self.thread is not None:
            await asyncio.sleep(0.02)
        await loop.run_in_executor(None, self.stop)

    def deliver(self, news: list[News], ended: bool = False) -> None:
        """Leave deltas for their streams, with one call into each loop where somebody waits for some."""
        given: dict[Stream, None] = {}
        for request, delta in news:
            if (stream := self.streams.get(request)) is not None:
                stream.deltas.put(delta)
                given[stream] = None
        waking: dict[asyncio.AbstractEventLoop, list[DeltaQueue]] = {}
        for stream in given:
            if ended or stream.request.ended:
                del self.streams[stream.request]
                stream.deltas.end()
            if stream.deltas.loop.is_closed():
                self.abandon(stream)
            elif stream.deltas.wakes:
                waking.setdefault(stream.deltas.loop, []).append(stream.deltas)
        for loop, queues in waking.items():
            with suppress(RuntimeError):  # closed this very moment, which the next delivery sees
                loop.call_soon_threadsafe(wake_all, queues)

    def abandon(self, stream: Stream) -> None:
        """End a request whose loop is closed, and with it whoever waited."""
        log.debug("a loop was closed before its requests had ended")
        self.streams.pop(stream.request, None)
        self.engine.cancel(stream.request.id)


def wake_all(queues: list[DeltaQueue]) -> None:
    for each in queues:
        each.wake()
