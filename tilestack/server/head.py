"""HEAD, by which monitors and proxies look whether a server is there: the answer to GET, without its body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Lets the routes answer GET, so that none has to know of HEAD."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        asked = {**scope, "method": "GET"}
        await self.app(asked, receive, without_body)
        scope["route"] = asked.get("route")  # by which the metrics count it
