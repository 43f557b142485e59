"""Who may ask: the API key, the name by which the server is addressed, and the site from which a page asks."""

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tilestack.server.errors import ApiError
from tilestack.server.settings import ServerSettings

OPEN = ("/health", "/")  # the page asks for the key itself
SAFE = ("GET", "HEAD")


class Access:
    """Refuses a request that may not be made, before anything of it is read."""

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self.app, self.settings, self.hosts = app, settings, settings.known_hosts
        self.key = None if settings.api_key is None else digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self.problem(scope)):
            await problem.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # Who sends no Host is no browser, and cannot have been led here.
        if self.hosts is not None and host and host_name(host) not in self.hosts:
            return ApiError(
                403,
                f"this server does not answer to the name {host!r}; start it with --allow-host {host_name(host)}",
                code="unknown_host",
            )
        origin = headers.get("origin")
        # A proxy may have changed the Host; what a browser says of the site, no page can.
        own = headers.get("sec-fetch-site") == "same-origin" or urlsplit(origin or "").netloc == host
        foreign = origin is not None and not own
        if foreign and scope["method"] not in SAFE and not {origin, "*"} & set(self.settings.cors):
            return ApiError(
                403, f"pages of {origin} may not ask; start the server with --cors {origin}", code="unknown_origin"
            )
        if self.key is not None and scope["path"] not in OPEN and not self.knows_key(headers):
            sent = headers.get("authorization") or headers.get("x-api-key")
            given = "the API key is wrong" if sent else "this server asks for an API key"
            return ApiError(
                401,
                f"{given}; send that of the server as Authorization: Bearer KEY, or X-Api-Key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def knows_key(self, headers: Headers) -> bool:
        assert self.key is not None
        return hmac.compare_digest(key_digest(headers), self.key)


def key_digest(headers: Headers) -> bytes:
    """Who asks: the key, as a digest, that is given as OpenAI's clients do or as Anthropic's."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return digest((given if kind.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode("latin-1"))


def digest(key: bytes) -> bytes:
    """Of one length for all keys, so that comparing takes the same time for all."""
    return hashlib.sha256(key).digest()


def host_name(host: str) -> str:
    """A Host header without its port: localhost:8000, 127.0.0.1, [::1]:8000."""
    return host.partition("]")[0].removeprefix("[").lower() if host.startswith("[") else host.partition(":")[0].lower()
