"""Every error in the shape of the API that was asked, OpenAI's or Anthropic's, whoever found it: the routes, FastAPI, or Starlette."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from tilestack.engine import EngineClosed, RequestError
from tilestack.extras import MissingExtra
from tilestack.server.schemas.common import CLASH

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = "/v1/messages"  # where its API begins
FIELDS = {"stop_ids": "stop_token_ids", "adapter": "model"}  # of requests, by the engine's names for what they ask


class ApiError(HTTPException):
    """A request that is answered with an error; `param` is the field at fault and `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, str(self.detail), self.param, self.code)

    def response(self) -> "ErrorResponse":
        return ErrorResponse(self.body(), self.status_code, self.headers)


class ErrorResponse(JSONResponse):
    """An error in OpenAI's shape, or in Anthropic's where its API was asked."""

    def __init__(self, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None):
        super().__init__(body, status, headers)
        self.told, self.beside = body["error"], headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(ANTHROPIC):
            await JSONResponse(anthropic_body(self.told), self.status_code, self.beside)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(error: dict[str, Any]) -> dict[str, Any]:
    kind = "api_error" if error["type"] == "server_error" else error["type"]
    return {"type": "error", "error": {**error, "type": kind}}


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error of a request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def ending() -> ApiError:
    return ApiError(
        503, "the server is ending; try another, or again later", code="ending", headers={"Retry-After": "5"}
    )


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Tell of a field by the name that it has in another API than OpenAI's chats."""
    try:
        yield
    except (ApiError, RequestError) as problem:
        problem.param = fields.get(problem.param or "", problem.param)
        raise


def add_handlers(app: FastAPI) -> None:
    """Answer whatever is raised in one shape."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, problem: HTTPException) -> JSONResponse:
        if isinstance(problem, ApiError):
            return problem.response()
        if problem.status_code == 400 and (why := problem.__cause__) is not None:  # FastAPI could not read the body
            return refuse(f"the body is not JSON: {why}", code="invalid_json").response()
        path = request.url.path
        message = {404: no_such_path(app, path), 405: f"{path} does not take {request.method}"}
        body = error_body(problem.status_code, message.get(problem.status_code, str(problem.detail)))
        return ErrorResponse(body, problem.status_code, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, problem: RequestValidationError) -> JSONResponse:
        return explain_malformed(problem.errors(), problem.body).response()

    @app.exception_handler(RequestError)
    async def unservable(request: Request, problem: RequestError) -> JSONResponse:
        return refuse(str(problem), FIELDS.get(problem.param or "", problem.param)).response()

    @app.exception_handler(RecursionError)
    async def nested(request: Request, problem: RecursionError) -> JSONResponse:
        return refuse("the body is nested too deeply").response()

    @app.exception_handler(EngineClosed)
    async def closed(request: Request, problem: EngineClosed) -> JSONResponse:
        return ending().response()

    @app.exception_handler(MissingExtra)
    async def not_installed(request: Request, problem: MissingExtra) -> JSONResponse:
        return ApiError(501, str(problem), code="not_installed").response()


def no_such_path(app: FastAPI, path: str) -> str:
    """What to do about a path that is none, above all where a client was given the address without /v1."""
    meant = "/v1" + path.replace("/v1", "")
    if meant in app.openapi()["paths"]:
        return f"there is no {path}, but {meant}; the address that clients are given ends in /v1, once"
    return f"there is no {path}; /openapi.json lists what there is"


def explain_malformed(found: Sequence[Any], body: Any) -> ApiError:
    """What is wrong with a body, from what pydantic found: the field first, then what was given and what is accepted."""
    if isinstance(body, bytes):  # as FastAPI leaves a body of another type, such as curl's by default
        return refuse(
            "the body is read as JSON only with the header Content-Type: application/json", code="invalid_json"
        )
    # Of a field that may be several things, each of them complains. That it is something else says least.
    telling = lambda error: (error["type"] == "extra_forbidden", not error["type"].endswith("_type"), len(error["loc"]))
    first = max(found, key=telling)
    if first["type"] == "json_invalid":
        return refuse(f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    place, *path = first["loc"]
    param = str(path[0]) if place == "query" else field_path(path, body, first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        return refuse(f"{param} is not supported", param, "unsupported_parameter")
    if first["type"] == "none_required":
        return refuse(f"{param} is not supported; leave it out", param, "unsupported_parameter")
    if first["type"] == "missing":
        return refuse(f"{param or 'a JSON body'} is missing", param or None, "missing_parameter")
    if first["type"] == "union_tag_invalid":
        known = first["ctx"]["expected_tags"]
        return refuse(f"{param}: {first['ctx']['tag'][:80]!r} is not supported; there is {known}", param)
    said = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == CLASH:  # of several fields, so that no single value is to be shown
        return refuse(f"{param}: {said}" if param else said, param or first["ctx"]["param"])
    given = json.dumps(first.get("input"), default=str)
    shown = given if len(given) <= 80 else given[:77] + "…"
    return refuse(f"{param or 'the body'}: {said}, not {shown}", param or None)


def field_path(location: Sequence[Any], body: Any, missing: bool) -> str:
    """Where in the body a field is, without pydantic's names for what it may be."""
    path = []
    for part in location:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            path.append(str(part))
            body = body[part]
    return ".".join([*path, str(location[-1])] if missing and location else path)
