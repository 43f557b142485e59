"""The routes of Anthropic's Messages API: answer a conversation, and count its tokens."""

from typing import Any

from fastapi import APIRouter, Request, Response

from tilestack.server.anthropic.answers import AnthropicAnswers
from tilestack.server.anthropic.conversation import FIELDS, chat_of
from tilestack.server.errors import ANTHROPIC, naming
from tilestack.server.limits import check_limits
from tilestack.server.prompts import chat_ids
from tilestack.server.routes import ERRORS, EVENTS
from tilestack.server.schemas import ChatRequest, CountRequest, MessagesRequest
from tilestack.server.service import Service, unless_client_leaves


def anthropic_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix=ANTHROPIC, responses=ERRORS)

    @router.post("", responses=EVENTS)
    async def answer(body: MessagesRequest, http: Request) -> Response:
        """Answer a conversation."""
        with naming(FIELDS):
            chat, ids = await read(body, http)
            params, thinking = service.chat_terms(chat, ids)
            answers = AnthropicAnswers(service.head("msg", body.model), chat, service.texts, thinking)
            return await service.answer(http, chat, [(ids, params)], answers)

    @router.post("/count_tokens")
    async def count(body: CountRequest, http: Request) -> dict[str, Any]:
        """How many tokens a conversation is as the model reads it."""
        with naming(FIELDS):
            _, ids = await read(body, http)
        return {"input_tokens": len(ids)}

    async def read(body: CountRequest, http: Request) -> tuple[ChatRequest, list[int]]:
        service.adapter(body.model)
        chat = chat_of(body)
        check_limits(chat, service.settings.limits)
        return chat, await unless_client_leaves(
            http, chat_ids(service.engine.tokenizer, chat.messages, chat.offered_tools, chat)
        )

    return router
