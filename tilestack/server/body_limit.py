"""A body is counted while it arrives, so that neither a large one nor a slow one is held in memory."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilestack.server.errors import ApiError
from tilestack.server.settings import Limits

LINGER = 5.0  # seconds for a client to stop sending what is not read any more
LINGER_BYTES = 16 << 20  # of it at most


class BodyLimit:
    """Ends a request whose body is larger, or takes longer, than the limits say, whether it told its length or not; and one
    that is compressed, of which nobody knows how large it is."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            await self.encoded(encoding).response()(scope, receive, lingering(receive, send))
            return
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > self.limits.body_bytes:
            await self.too_large().response()(scope, receive, lingering(receive, send))
            return
        await self.app(scope, *self.counted(receive, send))

    def counted(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """A `receive` that ends a request whose body is too much, and a `send` for the answer to it."""
        size, whole, ended = 0, False, False
        late = asyncio.get_running_loop().time() + self.limits.upload_seconds

        async def piece() -> Message:
            nonlocal size, whole, ended
            if whole:
                return await receive()  # what follows the body is the client's leaving, at whatever time
            try:
                async with asyncio.timeout_at(late):
                    message = await receive()
            except TimeoutError:
                ended = True
                raise ApiError(
                    408, f"the body took longer than {self.limits.upload_seconds:g} seconds", code="upload_timeout"
                ) from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.limits.body_bytes:
                ended = True
                raise self.too_large()
            return message

        async def answer(message: Message) -> None:
            await (last_words if ended else send)(message)

        last_words = lingering(receive, send)
        return piece, answer

    def encoded(self, encoding: str) -> ApiError:
        return ApiError(
            415,
            f"a body with Content-Encoding: {encoding} is not read; send it as it is",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity", "Connection": "close"},
        )

    def too_large(self) -> ApiError:
        # What is left unread would be taken for the next request of the connection.
        return ApiError(
            413,
            f"the body is larger than {self.limits.body_bytes:,} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def lingering(receive: Receive, send: Send) -> Send:
    """Sends an answer to a body that was not read to its end, and then takes for a while what the client still sends: a
    connection that is closed with bytes unread is reset, and who is still sending then never reads the answer."""

    async def told(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                await throw_away(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return told


async def throw_away(receive: Receive) -> None:
    """The rest of a body, or much of it."""
    size, more = 0, True
    while more and size < LINGER_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)  # there is none in the news that the client has left
