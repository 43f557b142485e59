"""The thread that takes an engine's steps.

Only it touches the engine. Others leave what they want in its inbox, and whoever asked is told by `deliver`: an asyncio loop
of this process (asynchronous.py), or another process (host.py). Whatever happens to the thread, every request ends.
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from tilestack.engine.engine import Engine, News
from tilestack.engine.outputs import Delta
from tilestack.engine.params import RequestError
from tilestack.engine.sequence import Request
from tilestack.garbage import startup_frozen

log = logging.getLogger(__name__)
Wish = Callable[[], list[News]]


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class EngineThread(ABC):
    def __init__(self, engine: Engine):
        self.engine = engine
        self.inbox: queue.SimpleQueue[Wish] = queue.SimpleQueue()
        self.streams: dict[Request, Any] = {}  # where the deltas of each go
        self.thread: threading.Thread | None = None
        self.closing = self.closed = False
        self.entering = 0  # sequences in the inbox
        self.lock = threading.Lock()  # of what several threads change: `closing` and `entering`

    @abstractmethod
    def deliver(self, news: list[News], ended: bool = False) -> None:
        """Hand on what came of requests; `ended`: these are at their end, whatever the engine knows of them."""

    @property
    def lost(self) -> Exception | None:
        """Why the engine cannot go on at all: it is of several processes, and one of them is gone."""
        return getattr(self.engine, "lost", None)

    @property
    def may_step(self) -> bool:
        """Whether there is a step to take."""
        return self.engine.busy

    def next_wish(self) -> Wish:
        """What is to be done, waiting for it while there is no step to take."""
        return self.inbox.get()

    def start(self) -> Self:
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
            self.thread.start()
        return self

    def enter(self, request: Request) -> list[News]:
        """Let the engine have a request that was checked, and whose stream is known."""
        try:
            self.engine.accept(request)
        except Exception as problem:
            if not isinstance(problem, RequestError | ModuleNotFoundError):
                log.exception("a request could not be added")
            self.deliver([(request, Delta(0, finish="error", error=str(problem)))], ended=True)
        return []

    def leave(self, wish: Wish, entering: int = 0) -> None:
        """Put a wish into the inbox, which brings so many sequences; once the engine is closing nobody would read it."""
        with self.lock:
            if self.closing:
                raise EngineClosed("the engine is being closed")
            self.entering += entering
            self.inbox.put(wish)

    def cancel(self, request: Request) -> None:
        self.inbox.put(lambda: self.engine.cancel(request.id) if request in self.streams else [])

    def stop(self) -> None:
        """Let the thread end, and wait for that."""
        self.closed = True
        self.inbox.put(list)
        self.start()  # one that never ran ends what was asked of it all the same
        assert self.thread is not None
        self.thread.join()

    def run(self) -> None:
        with startup_frozen(self.engine.runner.device):
            self.take_steps()

    def take_steps(self) -> None:
        """The thread: take what is in the inbox, take a step, hand on what came of it."""
        try:
            while not self.closed:
                try:
                    if not self.may_step:
                        self.deliver(self.next_wish()())
                    self.read_inbox()
                    if self.may_step:
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
