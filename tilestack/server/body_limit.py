"""A body is counted while it arrives, so that neither a large one nor a slow one is held in memory."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilestack.server.errors import ApiError
from tilestack.server.settings import Limits


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
            await self.encoded(encoding).response()(scope, receive, send)
            return
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > self.limits.body_bytes:
            await self.too_large().response()(scope, receive, send)
            return
        await self.app(scope, self.counted(receive), send)

    def counted(self, receive: Receive) -> Receive:
        size, whole = 0, False
        late = asyncio.get_running_loop().time() + self.limits.upload_seconds

        async def piece() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()  # what follows the body is the client's leaving, at whatever time
            try:
                async with asyncio.timeout_at(late):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"the body took longer than {self.limits.upload_seconds:g} seconds", code="upload_timeout"
                ) from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.limits.body_bytes:
                raise self.too_large()
            return message

        return piece

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
