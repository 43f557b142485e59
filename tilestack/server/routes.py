"""The routes of OpenAI's API, each a few steps: check, make token ids, let the engine work, shape the answer."""

import base64
import struct
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tilestack.server.chat_answers import ChatAnswers
from tilestack.server.completion_answers import CompletionAnswers
from tilestack.server.errors import ERROR_SCHEMA
from tilestack.server.limits import check_limits, most
from tilestack.server.prompts import chat_ids, text_ids
from tilestack.server.sampling import completion_params
from tilestack.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from tilestack.server.schemas.completion import as_list
from tilestack.server.service import Service, Vector, unless_client_leaves

ERRORS: dict[int | str, dict[str, Any]] = {
    kind: {"description": about, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for kind, about in (("4XX", "The request was refused."), ("5XX", "The request failed."))
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events.", "content": {"application/json": {}, "text/event-stream": {}}}
}


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=ERRORS)
    engine, limits, defaults = service.engine, service.settings.limits, service.settings.sampling

    @router.post("/chat/completions", responses=EVENTS)
    async def chat(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        service.adapter(body.model)
        check_limits(body, limits)
        ids = await unless_client_leaves(http, chat_ids(engine.tokenizer, body.messages, body.offered_tools, body))
        params, thinking = service.chat_terms(body, ids)
        answers = ChatAnswers(body, service.texts, service.head("chatcmpl", body.model), thinking)
        return await service.answer(http, body, [(ids, params)], answers)

    @router.post("/completions", responses=EVENTS)
    async def complete(body: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        service.adapter(body.model)
        given = as_list(body.prompt)
        check_limits(body, limits, len(given))
        each = await unless_client_leaves(http, text_ids(engine.tokenizer, given, "prompt"))
        for ids in each:
            service.check_prompt(ids, "prompt")
        prompts = [(ids, completion_params(body, engine.context - len(ids), defaults)) for ids in each]
        texts = [one if isinstance(one, str) else service.texts.echoed(one) for one in given] if body.echo else []
        answers = CompletionAnswers(body, service.texts, service.head("cmpl", body.model), texts)
        return await service.answer(http, body, prompts, answers)

    @router.post("/embeddings")
    async def embed(body: EmbeddingRequest, http: Request) -> Response:
        """Vectors of texts, each of length one."""
        service.adapter(body.model)
        given = as_list(body.input)
        most(limits.texts, len(given), "input", "texts in a request")
        each = await unless_client_leaves(http, text_ids(engine.tokenizer, given, "input"))
        for ids in each:
            service.check_prompt(ids, "input", room=0)
        found = await service.vectors(http, body, each)
        shape = packed if body.encoding_format == "base64" else list
        used = sum(map(len, each))
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": place, "embedding": shape(v)} for place, v in enumerate(found)],
            "model": body.model or service.name,
            "usage": {"prompt_tokens": used, "total_tokens": used},
        }
        return JSONResponse(answer)  # as it is, where FastAPI would look at every number

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The model that is served, and its adapters."""
        return {"object": "list", "data": [model_body(name) for name in (service.name, *engine.adapters)]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        service.adapter(name)
        return model_body(name)

    def model_body(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.began,
            "owned_by": "tilestack",
            "max_model_len": engine.context,
            "weights": engine.weights,
        }

    return router


def packed(vector: Vector) -> str:
    """Little-endian float32 in base64, as OpenAI's clients ask for it."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
