"""An engine without a model: it says what a test tells it to, a token at a time, through the same interface as the real one."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from tilestack.data import Tokenizer
from tilestack.engine import Delta, EngineClosed, QueueFull, RequestError, TokenLogprob, Usage
from tilestack.engine.delta_queue import DeltaQueue
from tilestack.engine.engine import EngineStats


def count_up(prompt: str) -> str:
    return " ".join(map(str, range(1000)))


@dataclass
class FakeEngine:
    """Answers each prompt with `says(prompt)`, cut at max_tokens, or with a vector; waits `pace` seconds before each token, and
    for a vector as long as the prompt has tokens."""

    tokenizer: Tokenizer
    says: Callable[[str], str] = count_up
    pace: float = 0.0
    model_name: str = "fake"
    context: int = 2048
    weights: str = "int4"
    adapters: tuple[str, ...] = ("pirate",)
    queue: int = 64  # requests that may run; there is no other queue
    vector: tuple[float, ...] = (0.6, 0.8)
    submitted: list = field(default_factory=list)
    totals: EngineStats = field(default_factory=lambda: EngineStats(waiting=0, running=0, pages=8, pages_used=2))
    closed: bool = False
    ending: bool = False
    lost: Exception | None = None

    def __post_init__(self):
        self.live = set()
        self.structures = SimpleNamespace(matcher=lambda structure: None)
        self.admission = SimpleNamespace(check_fits=lambda sequences: None)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def close(self, drain=0.0):
        self.closed = True
        for stream in list(self.live):
            stream.cancel()

    def submit(self, prompt, params, *, id, priority=0, adapter=None, salt="", pooling=None):
        if self.closed:
            raise EngineClosed("closed")
        if len(self.live) >= self.queue:
            raise QueueFull(f"{len(self.live)} wait")
        if adapter is not None and adapter not in self.adapters:
            raise RequestError(f"no adapter {adapter}")
        self.submitted.append((prompt, params, dict(id=id, priority=priority, adapter=adapter, salt=salt)))
        return FakeStream(self, prompt, params, pooling)

    def stats(self):
        self.totals.running = len(self.live)
        return self.totals


class FakeStream:
    def __init__(self, engine, prompt, params, pooling):
        self.engine, self.prompt, self.params, self.pooling = engine, prompt, params, pooling
        self.made, self.cancelled = 0, False
        self.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(TokenLogprob(token, -0.5, ((token, -0.5),)) for token in prompt[1:])]
        self.deltas = DeltaQueue(asyncio.get_running_loop())
        engine.live.add(self)
        self.task = asyncio.ensure_future(self.work())
        self.task.add_done_callback(self.end)

    def end(self, task):
        self.engine.live.discard(self)
        if task.cancelled():
            self.tell(Delta(0, finish="cancelled"))
        self.deltas.end()
        self.deltas.wake()

    def tell(self, delta):
        self.deltas.put(delta)
        if self.deltas.wakes:
            self.deltas.wake()

    async def work(self):
        text = self.engine.tokenizer.decode(self.prompt)
        if "explode" in text:
            self.tell(Delta(0, finish="error", error="RuntimeError: the model broke"))
            return
        if self.pooling:
            await asyncio.sleep(self.engine.pace * len(self.prompt))
            vector = self.engine.vector if self.pooling == "mean" else self.engine.vector[::-1]
            self.tell(Delta(0, finish="stop", vector=vector))
            return
        ids = self.engine.tokenizer.encode(self.engine.says(text), bare=True)
        most = self.params.max_tokens or self.engine.context - len(self.prompt)
        for place, token in enumerate(ids[:most]):
            await asyncio.sleep(self.engine.pace)
            for choice in range(self.params.n):
                self.put(choice, token)
            if place == 0 and "break later" in text:
                self.tell(Delta(0, finish="error", error="RuntimeError: the model broke"))
                return
        finish = "length" if len(ids) > most else "stop"
        for choice in range(self.params.n):
            self.tell(Delta(choice, finish=finish))

    def put(self, choice, token):
        self.made += 1
        self.engine.totals.completion_tokens += 1
        told = ()
        if self.params.logprobs is not None:
            told = (TokenLogprob(token, -0.25, ((token, -0.25), (0, float("-inf")))[: self.params.logprobs]),)
        self.tell(Delta(choice, (token,), self.engine.tokenizer.decode([token]), told))

    async def __aiter__(self):
        while ready := await self.deltas.take():
            for delta in ready:
                yield delta

    def cancel(self):
        if not self.cancelled and not self.task.done():
            self.cancelled = True
            self.task.cancel()

    @property
    def usage(self):
        return Usage(len(self.prompt), min(1, len(self.prompt)), self.made)


def empty_soon(fake, seconds=30):
    """Whether the engine holds no request, now or soon; answers that nobody ends must take longer than that."""
    ends = time.monotonic() + seconds
    while fake.live and time.monotonic() < ends:
        time.sleep(0.01)
    return not fake.live
