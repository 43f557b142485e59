"""An orderly end: new requests are turned away, those that run are given time, and then the server may go."""

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from tilestack.server.errors import ending

if TYPE_CHECKING:
    from tilestack.server.running import Running

OPEN = ("/health", "/metrics")


class Drain:
    """Whether the server is ending, and what it is still doing."""

    def __init__(self) -> None:
        self.begun = False
        self.requests = 0
        self.running: set[Running] = set()

    def cancel(self) -> None:
        """End what is left; each client is told."""
        for running in list(self.running):
            running.cancel()


class TurnAway:
    """Counts the requests that are being answered, and answers no new one when the server is ending."""

    def __init__(self, app: ASGIApp, drain: Drain):
        self.app, self.drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
        elif self.drain.begun:
            await ending().response()(scope, receive, send)
        else:
            self.drain.requests += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.drain.requests -= 1
