"""The server as a process: it says where it listens, and ends in order.

The first SIGTERM or Ctrl-C turns new requests away and gives running ones their time; the process then ends with 0. A
second ends it at once. An engine that is lost ends it too, and is no signal: one may well follow. In a process of its own
(apart.py) the server hears no signals, and its engine says when to end.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Self

import uvicorn

from tilestack.server.app import create_app
from tilestack.server.drain import Drain
from tilestack.server.listening import BACKLOG, address_of, listen
from tilestack.server.request_log import log, log_to_stderr
from tilestack.server.settings import ServerSettings

if TYPE_CHECKING:
    from tilestack.engine import Engine
    from tilestack.engine.remote import ServedEngine

GRACE = 2.0  # seconds for answers that were ended to reach their clients


class DrainingServer(uvicorn.Server):
    """uvicorn, which goes on listening while it drains, so that new requests hear why they are not answered."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        seconds: float,
        ready: Callable[[], None],
        engine: "ServedEngine",
    ):
        super().__init__(config)
        self.drain, self.seconds, self.ready, self.engine = drain, seconds, ready, engine
        self.asked = False  # to end, by a signal
        self.until = 0.0  # when running requests have had their time
        self.cancelled = 0.0  # when those that were left were ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + sig)
        self.asked = True
        self.begin_drain(self.seconds)

    def begin_drain(self, seconds: float) -> None:
        if self.drain.begun:
            return
        self.drain.begun = True
        self.until = time.monotonic() + seconds
        log.info("ending", extra={"fields": {"running": self.drain.requests, "drain_seconds": seconds}})

    async def on_tick(self, counter: int) -> bool:
        if self.engine.lost is not None:
            self.begin_drain(0.0)  # there is nothing to wait for
            self.until = 0.0
        elif self.engine.ending:
            self.begin_drain(self.seconds)
        if self.drain.begun and not self.should_exit:
            now = time.monotonic()
            if now > self.until:
                self.drain.cancel()
                self.cancelled = self.cancelled or now
            self.should_exit = self.drain.requests == 0 or (self.cancelled > 0 and now > self.cancelled + GRACE)
        return await super().on_tick(counter)


class ServerHere:
    """The server in the engine's own process, where a debugger sees both."""

    def __init__(self, settings: ServerSettings):
        self.settings, self.listening = settings, listen(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()

    def run(self, engine: "Engine", name: str, greet: Callable[[str], None]) -> None:
        from tilestack.engine import AsyncEngine

        run_server(AsyncEngine(engine, name), self.settings, self.listening, greet)


def run_server(
    engine: "ServedEngine",
    settings: ServerSettings,
    listening: socket.socket,
    greet: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until a signal comes, or the engine is lost or wants it; `greet` is called with the address when requests are taken.

    uvicorn reads requests with httptools and waits with uvloop where they are installed, else more slowly with Python alone.
    """
    log_to_stderr()
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=30,
        lifespan="on",
        ws="none",
        backlog=BACKLOG,
    )

    def ready() -> None:
        address = address_of(listening)
        log.info("listening", extra={"fields": {"address": address, "model": app.state.service.name}})
        greet(address)

    server = DrainingServer(config, app.state.service.drain, settings.drain, ready, engine)
    server.run(sockets=[listening])
    if not server.started:
        sys.exit(1)
    log.info("ended")
