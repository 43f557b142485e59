"""An engine whose server is another process: the side that has the engine (remote.py is the other).

    main thread      reads what the server asks ─► inbox ─┐
    engine's thread  takes steps ◄────────────────────────┘  and sends what came of each, one message a step

Python runs one thread of a process at a time. Were HTTP in the same process, each event of each stream would keep the engine
from launching the next step, and on a GPU a step of a small model is over before many are written.
"""

import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from tilestack.engine.engine import Engine, News
from tilestack.engine.messages import AT_ONCE, Frames, Malformed, Message, Sender, request_from_words
from tilestack.engine.sequence import Request
from tilestack.engine.thread import EngineThread, Wish

BEHIND = 16 << 20  # bytes unread by the server above which no step is taken: it cannot tell what it is told already
PAUSE = 0.005  # seconds until more is sent to a server that is behind


class EngineHost(EngineThread):
    """Serves the process at the other end of a socket."""

    streams: dict[Request, int]

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        connection: socket.socket,
        settings: Any = None,
        greet: Callable[[str], None] = lambda address: None,
    ):
        """`settings` are for the server, as JSON can say them; `greet` is called with its address once it listens there."""
        super().__init__(engine)
        self.connection, self.greet = connection, greet
        self.requests: dict[int, Request] = {}  # by the server's numbers
        self.sender = Sender(connection)
        self.stats = figures_of(engine)  # as they were told last
        self.told_of_loss = False
        self.sender.send(["hello", introduction(engine, model_name), settings])

    def serve(self) -> None:
        """Until the server is gone: it has ended, or was killed."""
        self.start()
        frames = Frames()
        try:
            while data := self.receive():
                for message in frames.feed(data):
                    self.take(message)
        finally:
            self.stop()

    def receive(self) -> bytes:
        try:
            return self.connection.recv(AT_ONCE)
        except ConnectionError:  # with something unread at the other end
            return b""

    def take(self, message: Message) -> None:
        """Do what the server asks."""
        try:
            what, *given = message
            if what == "submit":
                number, words = given
                self.inbox.put(partial(self.begin, int(number), request_from_words(words)))
            elif what == "cancel":
                (number,) = given
                self.inbox.put(partial(self.end, int(number)))
            elif what == "listening":
                self.greet(*given)
            else:
                raise Malformed(f"there is no message {what!r}")
        except (ValueError, TypeError, KeyError) as problem:
            raise Malformed(f"the server asks what cannot be read: {problem}") from problem

    def ask_to_end(self) -> None:
        """Let the server give running requests their time and end. A signal handler may call this."""
        self.inbox.put(partial(self.tell, ["end"]))

    def tell(self, message: Message) -> list[News]:
        self.sender.send(message)
        return []

    def begin(self, number: int, request: Request) -> list[News]:
        self.streams[request], self.requests[number] = number, request
        return self.enter(request)

    def end(self, number: int) -> list[News]:
        request = self.requests.get(number)
        return [] if request is None else self.engine.cancel(request.id)

    @property
    def may_step(self) -> bool:
        return self.engine.busy and len(self.sender.unsent) < BEHIND

    def next_wish(self) -> Wish:
        if not self.sender.unsent:
            return self.inbox.get()
        self.sender.flush()
        try:
            return self.inbox.get(timeout=PAUSE)
        except queue.Empty:
            return list

    def deliver(self, news: list[News], ended: bool = False) -> None:
        known = [(request, delta) for request, delta in news if request in self.streams]
        deltas = [(self.streams[request], request.cached, delta) for request, delta in known]
        last = dict.fromkeys(request for request, delta in known if ended or (delta.finish and request.ended))
        ends = [self.forget(request) for request in last]
        stats = figures_of(self.engine)
        if deltas or stats != self.stats:
            self.stats = stats
            self.sender.send(["news", deltas, ends, stats])
        if self.lost and not self.told_of_loss:
            self.told_of_loss = True
            self.sender.send(["lost", str(self.lost)])

    def forget(self, request: Request) -> tuple[int, int, Any]:
        """The last of a request: its number, how many tokens were drawn, and what was asked about its prompt."""
        number = self.streams.pop(request)
        del self.requests[number]
        told = request.prompt_logprobs if request.params.prompt_logprobs is not None else None
        return number, self.engine.usage(request).completion, told

    def end_all(self) -> None:
        try:
            super().end_all()
        finally:
            with suppress(OSError):  # closed at the other end
                self.connection.shutdown(socket.SHUT_RDWR)


def introduction(engine: Engine, model_name: str) -> dict[str, Any]:
    """What a server has to know of an engine."""
    assert engine.tokenizer is not None
    return {
        "model_name": model_name,
        "weights": engine.weights,
        "ends": sorted(engine.ends),
        "admission": asdict(engine.admission),
        "tokenizer": engine.tokenizer.to_json(),
        "stats": figures_of(engine),
    }


def figures_of(engine: Engine) -> list[int]:
    return list(vars(engine.stats()).values())
