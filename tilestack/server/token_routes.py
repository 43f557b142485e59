"""Texts and conversations as token ids and back, at the addresses and in the words of vLLM."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from tilestack.server.errors import refuse
from tilestack.server.limits import most
from tilestack.server.prompts import chat_ids, encoded
from tilestack.server.routes import ERRORS
from tilestack.server.schemas import DetokenizeRequest, TokenizeRequest
from tilestack.server.service import Service, unless_client_leaves


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    engine, limits = service.engine, service.settings.limits

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
        """The tokens of a text, or of a conversation as the model reads it."""
        service.adapter(body.model)
        most(limits.messages, len(body.messages or ()), "messages", "messages")
        most(limits.tools, len(body.tools or ()), "tools", "tools")
        if body.messages is not None:
            work = chat_ids(engine.tokenizer, body.messages, body.tools, body, bool(body.add_special_tokens))
        else:
            bare, text = body.add_special_tokens is False, body.prompt or ""
            work = encoded(lambda: engine.tokenizer.encode(text, bare=bare), "prompt")
        ids = await unless_client_leaves(http, work)
        written = lambda: list(map(engine.tokenizer.backend.id_to_token, ids))
        strings = await asyncio.to_thread(written) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": engine.context, "tokens": ids, "token_strs": strings}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
        """The text of tokens, special ones included."""
        service.adapter(body.model)
        known = engine.tokenizer.vocabulary
        if (highest := max(body.tokens, default=0)) >= known:
            raise refuse(f"token {highest} is unknown; there are {known:,}", "tokens")
        work = asyncio.to_thread(engine.tokenizer.decode, body.tokens, special=True)
        return {"prompt": await unless_client_leaves(http, work)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What a client has to know to write prompts itself, in the names of a `tokenizer_config.json`."""
        tokenizer = engine.tokenizer
        marks = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
        written = {name: None if id is None else tokenizer.backend.id_to_token(id) for name, id in marks.items()}
        return {**written, "chat_template": tokenizer.template, "model_max_length": engine.context}

    return router
