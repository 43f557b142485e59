"""The engine for programs that wait: a thread takes its steps, and requests stream into any asyncio loop.

    async with AsyncEngine.load("smollm2") as engine:
        stream = engine.submit(ids, SamplingParams(max_tokens=64))
        async for delta in stream:
            print(delta.text, end="")

Only the thread touches the engine. Others leave what they want in its inbox, and find deltas in their loop. Whatever
happens to the thread, every stream ends.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from tilestack.data import Tokenizer
from tilestack.engine.delta_queue import DeltaQueue
from tilestack.engine.engine import Engine, EngineStats, News
from tilestack.engine.outputs import Delta, TokenLogprob, Usage
from tilestack.engine.params import RequestError, SamplingParams
from tilestack.engine.sequence import Request
from tilestack.engine.settings import EngineSettings
from tilestack.garbage import startup_frozen

log = logging.getLogger(__name__)


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class Stream:
    """What comes of a request: iterate for its deltas. Leaving an `async with` block cancels what is left of it."""

    def __init__(self, engine: "AsyncEngine", request: Request, loop: asyncio.AbstractEventLoop):
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


class AsyncEngine:
    def __init__(self, engine: Engine, model_name: str = ""):
        self.engine, self.model_name = engine, model_name
        self.inbox: queue.SimpleQueue[Callable[[], list[News]]] = queue.SimpleQueue()
        self.streams: dict[Request, Stream] = {}
        self.numbers = itertools.count()
        self.thread: threading.Thread | None = None
        self.closing = self.closed = False
        self.entering = 0  # sequences in the inbox
        self.lock = threading.Lock()  # of what several threads change: `closing` and `entering`

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

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def start(self) -> "AsyncEngine":
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
            self.thread.start()
        return self

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
                self.engine.accept(request)
            except Exception as problem:
                if not isinstance(problem, RequestError | ModuleNotFoundError):
                    log.exception("a request could not be added")
                self.deliver([(request, Delta(0, finish="error", error=str(problem)))], ended=True)
            finally:
                with self.lock:  # not before it waits, lest others take its place
                    self.entering -= params.drawn
            return []

        self.leave(enter, params.drawn)
        return stream

    def leave(self, wish: Callable[[], list[News]], entering: int = 0) -> None:
        """Put a wish into the inbox, which brings so many sequences; once the engine is closing nobody would read it."""
        with self.lock:
            if self.closing:
                raise EngineClosed("the engine is being closed")
            self.entering += entering
            self.inbox.put(wish)

    def cancel(self, request: Request) -> None:
        self.inbox.put(lambda: self.engine.cancel(request.id) if request in self.streams else [])

    async def close(self, drain: float = 0.0) -> None:
        """Take no more requests, give those that run so many seconds, cancel the rest, and end the thread."""
        with self.lock:
            self.closing = True
        loop = asyncio.get_running_loop()
        ends = loop.time() + drain
        while (self.streams or self.entering) and loop.time() < ends and self.thread is not None:
            await asyncio.sleep(0.02)
        self.closed = True
        self.inbox.put(list)
        self.start()  # one that never ran ends what was asked of it all the same
        assert self.thread is not None
        await loop.run_in_executor(None, self.thread.join)

    def run(self) -> None:
        with startup_frozen(self.engine.runner.device):
            self.take_steps()

    def take_steps(self) -> None:
        """The thread: take what is in the inbox, take a step, hand on what came of it."""
        try:
            while not self.closed:
                try:
                    if not self.engine.busy:
                        self.deliver(self.inbox.get()())
                    self.read_inbox()
                    if self.engine.busy:
                        self.deliver(self.engine.step())
                except Exception as problem:
                    log.exception("the engine failed")
                    self.deliver(self.engine.fail_all(problem))
        finally:
            with self.lock:
                self.closing = self.closed = True
            self.end_all()

    def read_inbox(self) -> None:
        while not self.inbox.empty():
            self.deliver(self.inbox.get()())

    def end_all(self) -> None:
        """The thread ends: so does whatever there is, wherever it is."""
        try:
            self.read_inbox()
            self.deliver(self.engine.fail_all(EngineClosed("the engine was closed"), "cancelled"))
        finally:
            for request in list(self.streams):
                self.deliver([(request, Delta(0, finish="cancelled"))], ended=True)

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
