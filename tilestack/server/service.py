"""What the routes stand on: the engine, the settings, and the steps that all of them take."""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from tilestack.engine.params import RequestError, SamplingParams
from tilestack.server.drain import Drain
from tilestack.server.errors import ApiError, refuse
from tilestack.server.events import Answers, EventStream, started
from tilestack.server.limits import check_prompt
from tilestack.server.metrics import Metrics
from tilestack.server.pacing import Pace
from tilestack.server.prompts import plain_text
from tilestack.server.reasoning import opens_thoughts
from tilestack.server.running import Prompt, Running
from tilestack.server.sampling import calls_strictly, chat_params, structure_field
from tilestack.server.schemas import ChatRequest
from tilestack.server.schemas.common import Sampled
from tilestack.server.schemas.embedding import EmbeddingRequest
from tilestack.server.settings import ServerSettings
from tilestack.server.token_text import TokenTexts

if TYPE_CHECKING:
    from tilestack.engine.remote import ServedEngine

Result = TypeVar("Result")
Vector = tuple[float, ...]


class ClientLeft(ApiError):
    """Nobody reads the answer any more. The status is the one that nginx logs."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_left")


class Service:
    """One engine behind one server."""

    def __init__(self, engine: "ServedEngine", settings: ServerSettings):
        self.engine, self.settings = engine, settings
        self.name = settings.name or engine.model_name
        self.began = int(time.time())
        self.metrics, self.drain = Metrics(engine), Drain()
        self.pace = Pace(lambda: len(self.drain.running) / settings.events_per_second)
        self.texts = TokenTexts(engine.tokenizer)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request names as its model; None for the model itself."""
        if model in (None, self.name):
            return None
        if model not in self.engine.adapters:
            known = ", ".join((self.name, *self.engine.adapters))
            raise ApiError(404, f"no model {model!r} here; there is {known}", param="model", code="model_not_found")
        return model

    def check_prompt(self, ids: list[int], param: str, room: int = 1) -> None:
        check_prompt(ids, self.engine.context, self.settings.limits, param, room)

    def chat_terms(self, request: ChatRequest, ids: list[int]) -> tuple[SamplingParams, bool | None]:
        """How a conversation is answered: the parameters, and whether the answer begins within thoughts; None where thoughts
        are not told from text."""
        self.check_prompt(ids, "messages")
        room = self.engine.context - len(ids)
        params = chat_params(request, room, self.settings.limits.output_tokens, self.settings.sampling)
        if not self.settings.split_reasoning or not (params.structure is None or calls_strictly(request)):
            return params, None
        continued = plain_text(request.messages[-1].content) if request.continue_final_message else ""
        return params, opens_thoughts(self.engine.tokenizer, ids, continued)

    async def check_structure(self, request: Sampled, params: SamplingParams) -> None:
        """Refuse a form that cannot be read. The engine reads it again, but in its own thread, where it is too late for that."""
        if params.structure is None:
            return
        try:
            await asyncio.to_thread(self.engine.structures.matcher, params.structure)
        except RequestError as problem:
            raise refuse(str(problem), structure_field(request)) from problem

    def head(self, prefix: str, model: str | None) -> dict[str, Any]:
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model or self.name}

    async def answer(self, http: Request, request: Sampled, prompts: Sequence[Prompt], answers: Answers) -> Response:
        """Let the engine answer, and shape what comes as the client asked for it."""
        await self.check_structure(request, prompts[0][1])
        with ExitStack() as cleanup:
            running = self.begin(http, cleanup, answers.shared["id"], request, prompts)
            if request.stream:
                events = answers.events(running)
                first = await unless_client_leaves(http, started(running, events))
                return EventStream(running, first, events, answers.failure, cleanup.pop_all().close)
            completions = await unless_client_leaves(http, running.completions())
            return JSONResponse(answers.whole(completions, running))

    async def vectors(self, http: Request, request: EmbeddingRequest, texts: Sequence[list[int]]) -> list[Vector]:
        """Let the engine read texts, which wait, run and end as prompts do; some at a time, so that many leave room in the
        queue for others."""
        with ExitStack() as cleanup:
            return await unless_client_leaves(http, self.read_in_portions(http, cleanup, request, texts))

    async def read_in_portions(
        self, http: Request, cleanup: ExitStack, request: EmbeddingRequest, texts: Sequence[list[int]]
    ) -> list[Vector]:
        found: list[Vector] = []
        clock = asyncio.get_running_loop().time
        until = clock() + self.settings.limits.request_seconds
        while len(found) < len(texts):
            portion = texts[len(found) : len(found) + self.settings.limits.prompts]
            prompts = [(ids, SamplingParams()) for ids in portion]
            id = f"embd-{uuid.uuid4().hex}"
            try:
                running = self.begin(http, cleanup, id, request, prompts, until, pooling=request.pooling or "mean")
            except RequestError as problem:  # of a prompt, or of too many of them
                raise refuse(str(problem), "input") from problem
            except ApiError as full:
                if full.code != "queue_full" or not found or clock() > until:
                    raise
                await asyncio.sleep(self.settings.retry_after)  # rather than do again what is done already
                continue
            found += [each.vector for each in await running.completions()]
        return found

    def begin(
        self,
        http: Request,
        cleanup: ExitStack,
        id: str,
        request: Sampled | EmbeddingRequest,
        prompts: Sequence[Prompt],
        until: float | None = None,
        **options: Any,
    ) -> Running:
        """Hand prompts to the engine; `cleanup` ends what is left of them, and they end by themselves at a time of the event
        loop, or when a request has had its seconds."""
        running = Running(
            self.engine,
            self.metrics,
            prompts,
            seconds=self.settings.limits.request_seconds,
            until=until,
            retry=self.settings.retry_after,
            pace=self.pace,
        )
        cleanup.callback(self.ended, http, running)
        adapter, salt = self.adapter(request.model), request.cache_salt or ""
        running.submit(id, priority=request.priority or 0, adapter=adapter, salt=salt, **options)
        self.drain.running.add(running)
        return running

    def ended(self, http: Request, running: Running) -> None:
        """However a request ended, the engine is done with it, and its figures are in the log."""
        running.cancel()
        self.drain.running.discard(running)
        usage, first, log = running.usage, running.watch.first, http.scope["state"]["log"]
        log |= {
            "prompt_tokens": log.get("prompt_tokens", 0) + usage.prompt,
            "cached_tokens": log.get("cached_tokens", 0) + usage.cached,
            "completion_tokens": log.get("completion_tokens", 0) + usage.completion,
            "first_token_seconds": None if first is None else round(first, 4),
        }


async def unless_client_leaves(http: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is given up when the client goes before it is there."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
