"""Answers as server-sent events: pieces of JSON, the usage where it was asked for, and [DONE].

An error after the first event cannot change the status any more; it is an event of its own, which OpenAI's clients raise.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tilestack.engine.outputs import Completion
from tilestack.server.errors import ApiError
from tilestack.server.running import Running, usage_body
from tilestack.server.schemas.common import Sampled

DONE = b"data: [DONE]\n\n"
encode = json.JSONEncoder(separators=(",", ":")).encode
LAST_WORDS = 2.0  # seconds for a client to take the event that tells why its stream ends early
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second keeps nginx from holding events back


class Chunks:
    """Writes the events of one answer; what all of them share is written once."""

    def __init__(self, shared: dict[str, Any], request: Sampled, running: Running):
        self.running, self.always = running, request.wants_usage_always
        self.head = f'data: {encode(shared)[:-1]},"choices":['
        self.tail = '],"usage":null}\n\n' if request.wants_usage else "]}\n\n"

    def choice(self, body: dict[str, Any]) -> bytes:
        return self.written(encode(body))

    def written(self, body: str) -> bytes:
        """The event of a choice that is JSON already."""
        return f"{self.head}{body}{self.usage_tail() if self.always else self.tail}".encode()

    def usage(self) -> bytes:
        """The event that tells what the request has cost."""
        return f"{self.head}{self.usage_tail()}".encode()

    def usage_tail(self) -> str:
        return f'],"usage":{encode(usage_body(self.running.usage))}}}\n\n'


class Answers(ABC):
    """The answers to one request in the words of its API, whole or as events."""

    shared: dict[str, Any]  # what all events tell, with the answer's id

    @abstractmethod
    def whole(self, completions: Sequence[Completion], running: Running) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, running: Running) -> AsyncIterator[bytes]: ...

    def failure(self, problem: ApiError) -> bytes:
        """The last event of a stream that ends early."""
        return f"data: {encode(problem.body())}\n\n".encode() + DONE


class EventStream(StreamingResponse):
    """Sends events until they end, the time is up, or the client leaves; `ended` is called in any case. `failure` is the last
    event where something goes wrong."""

    def __init__(
        self,
        running: Running,
        first: bytes,
        events: AsyncIterator[bytes],
        failure: Callable[[ApiError], bytes],
        ended: Callable[[], None],
    ):
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self.running, self.first, self.events, self.failure, self.ended = running, first, events, failure, ended
        self.problem: str | None = None  # what ended it early, for the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope["state"]["log"]["error"] = self.problem
            self.ended()

    async def stream_response(self, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.running.deadline):
                await self.send_all(send)
        except TimeoutError:
            await self.end_with(self.running.late(), send)
        except ApiError as problem:
            await self.end_with(problem, send)

    async def send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        async for event in self.events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def end_with(self, problem: ApiError, send: Send) -> None:
        """Tell why; a client that reads nothing any more is not waited for."""
        self.problem = problem.code
        self.running.cancel()
        last = self.failure(problem)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await send({"type": "http.response.body", "body": last, "more_body": False})


async def started(running: Running, events: AsyncIterator[bytes]) -> bytes:
    """The first of the events: what goes wrong before it has a status of its own."""
    try:
        async with asyncio.timeout_at(running.deadline):
            return await anext(events)
    except TimeoutError:
        raise running.late() from None
