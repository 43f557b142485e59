"""Logs as lines of JSON, one for each request, by which a client's report can be matched: every answer carries its id."""

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilestack.server.errors import ApiError

ACCEPTED_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
QUIET = ("/health", "/metrics")  # asked every few seconds; logged when something is wrong
log = logging.getLogger("tilestack.server")


class JsonLines(logging.Formatter):
    """A record as one line of JSON; what is given as `extra={"fields": …}` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let the server, and uvicorn beneath it, write lines of JSON to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("tilestack", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "tilestack" else logging.WARNING)


class RequestLog:
    """Gives each request an id, its own or the client's, and logs how it was answered and how long that took.

    What the routes put into `scope["state"]["log"]` is logged with it. An exception that nobody foresaw ends here, in a
    traceback in the log and a 500 that says no more than the id.
    """

    def __init__(self, app: ASGIApp, answered: Counter):
        self.app, self.answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if ACCEPTED_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        client = (scope.get("client") or (None,))[0]
        fields: dict[str, Any] = {"id": name, "client": client, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {})["log"] = fields
        began, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            log.exception("a request failed", extra={"fields": fields})
            if status:
                raise
            problem = ApiError(
                500, f"the server failed on this request; its log has more under {name}", code="internal"
            )
            await problem.response()(scope, receive, noted)
        finally:
            fields |= {"status": status, "seconds": round(time.perf_counter() - began, 4)}
            route = getattr(scope.get("route"), "path", "other")
            self.answered.labels(path=route, status=status).inc()
            if scope["path"] not in QUIET or status >= 400:
                log.info("request", extra={"fields": fields})
