"""An engine in another process: the side that asks (host.py is the other), with the interface of AsyncEngine.

What can be refused at once is refused here, by the engine's limits and the number of sequences it was given. All of it runs in
one asyncio loop.
"""

import asyncio
import itertools
import logging
import socket
from typing import Any

from tilestack.data import Tokenizer
from tilestack.engine.admission import Admission
from tilestack.engine.asynchronous import AsyncEngine, Stream
from tilestack.engine.engine import EngineStats, QueueFull
from tilestack.engine.messages import Frames, Malformed, Message, framed, logprob_from_words, request_as_words
from tilestack.engine.outputs import Delta, Usage
from tilestack.engine.params import SamplingParams
from tilestack.engine.sequence import Request
from tilestack.engine.structure import Structures
from tilestack.engine.thread import EngineClosed

log = logging.getLogger(__name__)
GONE = "the engine's process has ended"


class RemoteStream(Stream):
    """The stream of a request that another process works on."""

    def __init__(self, engine: "RemoteEngine", request: Request, loop: asyncio.AbstractEventLoop, number: int):
        super().__init__(engine, request, loop)
        self.number, self.left, self.drawn = number, request.params.drawn, 0

    def add(self, cached: int, delta: Delta) -> None:
        self.request.cached = cached
        self.drawn += len(delta.ids)
        self.deltas.put(delta)

    def cancel(self) -> None:
        if not self.deltas.ended:
            self.engine.cancel(self.number)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), self.request.cached, self.drawn)


class RemoteEngine(asyncio.Protocol):
    def __init__(self, connection: socket.socket, about: dict[str, Any]):
        """`about` is what the engine's process says of it."""
        self.connection = connection
        self.model_name, self.weights = about["model_name"], about["weights"]
        self.tokenizer = Tokenizer.from_json(about["tokenizer"])
        self.admission = Admission(**about["admission"])
        self.adapters = tuple(self.admission.adapters)
        self.context = self.admission.context
        self.structures = Structures(self.tokenizer, self.admission.vocabulary, about["ends"])
        self.transport: Any = None
        self.frames = Frames()
        self.numbers = itertools.count()
        self.streams: dict[int, RemoteStream] = {}
        self.sequences = 0  # that the engine has
        self.latest = EngineStats(*about["stats"])
        self.closed = self.ending = False
        self.lost: Exception | None = None

    async def __aenter__(self) -> "RemoteEngine":
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self.connection)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True
        self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, problem: Exception | None) -> None:
        """Nothing more will come; whoever waits is told."""
        if not self.closed:
            self.lose(GONE)
        for stream in self.streams.values():
            stream.deltas.put(Delta(0, finish="error", error=f"{self.lost or GONE}"))
            end(stream)
        self.streams.clear()

    def lose(self, why: str) -> None:
        """Take nothing more."""
        log.error("the engine is lost: %s", why)
        self.lost, self.closed = EngineClosed(why), True

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.frames.feed(data):
                self.take(message)
        except (ValueError, TypeError, KeyError) as problem:
            self.lose(f"what its process says cannot be read: {problem!r}")
            self.transport.abort()

    def take(self, message: Message) -> None:
        what, *given = message
        if what == "news":
            self.take_news(*given)
        elif what == "lost":
            self.lose(*given)
        elif what == "end":
            self.ending = True
        else:
            raise Malformed(f"there is no message {what!r}")

    def take_news(self, deltas: list[Any], ends: list[Any], stats: list[int]) -> None:
        """What a step brought."""
        told: dict[RemoteStream, None] = {}
        for number, cached, (choice, ids, text, logprobs, finish, stopped_by, error, vector) in deltas:
            stream = self.streams[number]
            likely = tuple(map(logprob_from_words, logprobs)) if logprobs else ()
            delta = Delta(choice, tuple(ids), text, likely, finish, stopped_by, error, tuple(vector))
            stream.add(cached, delta)
            if finish:
                self.sequences -= 1
                stream.left -= 1
            told[stream] = None
        for number, drawn, prompt_logprobs in ends:
            stream = self.streams.pop(number)
            self.sequences -= stream.left
            stream.drawn = drawn
            if prompt_logprobs is not None:
                stream.request.prompt_logprobs = [words and logprob_from_words(words) for words in prompt_logprobs]
            stream.deltas.end()
        self.latest = EngineStats(*stats)
        for stream in told:
            if stream.deltas.wakes:
                stream.deltas.wake()

    def tell(self, *message: Any) -> None:
        self.transport.write(framed(list(message)))

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
    ) -> RemoteStream:
        """Queue a request from within the loop; raises RequestError, QueueFull or EngineClosed at once."""
        params, number = params or SamplingParams(), next(self.numbers)
        request = Request(id or f"request-{number}", list(prompt), params, priority, adapter, salt, pooling)
        self.admission.check(request)
        self.check_queue(params.drawn)
        if self.closed:
            raise EngineClosed(GONE if self.lost else "the engine is being closed")
        self.streams[number] = stream = RemoteStream(self, request, asyncio.get_running_loop(), number)
        self.sequences += params.drawn
        self.tell("submit", number, request_as_words(request))
        return stream

    def check_queue(self, sequences: int) -> None:
        """Refuse so many where too many wait, as the engine would: it has no others than those of this process."""
        most = self.admission.queue
        if most is not None and self.sequences + sequences > most + self.admission.rows:
            raise QueueFull(f"at most {most} may wait, and there is no room for {sequences} more")

    def cancel(self, number: int) -> None:
        if not self.closed:
            self.tell("cancel", number)

    def stats(self) -> EngineStats:
        """As of the engine's last step."""
        return self.latest


ServedEngine = AsyncEngine | RemoteEngine  # either is the same to a server


def end(stream: RemoteStream) -> None:
    stream.deltas.end()
    if stream.deltas.wakes:
        stream.deltas.wake()
