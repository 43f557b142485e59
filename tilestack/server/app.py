"""The application: routes, errors and middleware around one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.cors import CORSMiddleware

import tilestack
from tilestack.server.access import Access
from tilestack.server.anthropic.routes import anthropic_routes
from tilestack.server.body_limit import BodyLimit
from tilestack.server.drain import TurnAway
from tilestack.server.errors import add_handlers
from tilestack.server.head import HeadAsGet
from tilestack.server.metrics import TYPE
from tilestack.server.page import page_response
from tilestack.server.prompts import warm_up
from tilestack.server.request_log import RequestLog
from tilestack.server.responses.routes import response_routes
from tilestack.server.routes import ERRORS, openai_routes
from tilestack.server.service import Service
from tilestack.server.settings import ServerSettings
from tilestack.server.token_routes import token_routes

if TYPE_CHECKING:
    from tilestack.engine.remote import ServedEngine


def create_app(engine: "ServedEngine", settings: ServerSettings | None = None) -> FastAPI:
    """A server of this engine, which starts and ends with it."""
    service = Service(engine, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            await warm_up(engine.tokenizer)
            yield

    app = FastAPI(
        title="tilestack",
        version=tilestack.__version__,
        summary="A language model behind OpenAI's API.",
        lifespan=lifespan,
        docs_url=None,  # they load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    add_handlers(app)
    app.include_router(openai_routes(service))
    app.include_router(response_routes(service))
    app.include_router(anthropic_routes(service))
    app.include_router(token_routes(service))

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """Whether requests are taken."""
        if service.drain.begun or engine.closed:  # which it is, too, when its thread or its process has died
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=TYPE)

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> Response:
        """A page to chat with the model."""
        return page_response()

    add_middleware(app, service)
    return app


def add_middleware(app: FastAPI, service: Service) -> None:
    """From the innermost to the one that sees a request first."""
    settings = service.settings
    app.add_middleware(BodyLimit, limits=settings.limits)
    app.add_middleware(TurnAway, drain=service.drain)
    app.add_middleware(Access, settings=settings)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client for browsers tells of itself in headers of its own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestLog, answered=service.metrics.answered)
