"""From a request for a response to a chat: its items after those of the response that it continues, and its fields in the
words of a chat, so that both are read, limited and answered by the same code."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilestack.server.errors import ApiError, refuse
from tilestack.server.limits import check_limits, longest_prompt, most
from tilestack.server.prompts import chat_ids
from tilestack.server.responses.items import LIST, fewest, latest, messages_of, stored_form
from tilestack.server.responses.store import Key, ResponseStore
from tilestack.server.schemas import ChatRequest, ResponsesRequest
from tilestack.server.schemas.chat import Instruction, NamedFunction, ResponseFormat, SchemaFormat, Tool, ToolChoice
from tilestack.server.schemas.common import Generated
from tilestack.server.schemas.items import ItemReference, MessageItem, Whole
from tilestack.server.schemas.responses import ChosenFunction, SchemaText
from tilestack.server.service import Service
from tilestack.server.settings import Limits

FIELDS = {  # of a response, by their names in a chat
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True)
class Conversation:
    """What is to be answered."""

    items: list[Whole]
    context: tuple[bytes, ...]  # the same as JSON, as it is stored: one part for each request and answer
    ids: tuple[str, ...]  # of the items that came with this request


def read_conversation(request: ResponsesRequest, store: ResponseStore, owner: bytes, limits: Limits) -> Conversation:
    """The items of a request, after those of the response that it continues."""
    before: tuple[bytes, ...] = ()
    if request.previous_response_id is not None:
        if (previous := store.responses.get((owner, request.previous_response_id))) is None:
            raise refuse(
                f"no stored response {request.previous_response_id!r}; it may have been made with store: false, or be forgotten",
                "previous_response_id",
                "previous_response_not_found",
            )
        before = (*previous.context, previous.output)
    given = [MessageItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    most(limits.messages, len(given), "input", "items")
    stored = StoredItems(store, owner)
    forms = [stored.find(item.id) if isinstance(item, ItemReference) else stored_form(item) for item in given]
    try:
        context = (*before, json.dumps(forms, ensure_ascii=False).encode())
    except UnicodeEncodeError as problem:  # half of a surrogate pair
        raise refuse(f"input holds what is not text: {problem}", "input") from problem
    items = [item for part in context for item in LIST.validate_json(part)]
    most(limits.messages, len(items), "input", "items")
    if twice := next((id for id, times in Counter(item.id for item in items).items() if times > 1), None):
        raise refuse(
            f"the item {twice!r} is twice in the conversation, which begins with what previous_response_id stands for; give each "
            "item once",
            "input",
            "duplicate_item",
        )
    return Conversation(items, context, tuple(form["id"] for form in forms))


class StoredItems:
    """Items by their ids, where a request refers to them; a response that has several is read once."""

    def __init__(self, store: ResponseStore, owner: bytes):
        self.store, self.owner = store, owner
        self.read: dict[Key, dict[str, dict[str, Any]]] = {}

    def find(self, id: str) -> dict[str, Any]:
        if (response := self.store.with_item.get((self.owner, id))) is None:
            raise ApiError(
                404,
                f"no stored item {id!r}; its response may have been made with store: false, or be forgotten",
                param="input",
                code="item_not_found",
            )
        if response not in self.read:
            self.read[response] = self.store.responses[response].own_items()
        return self.read[response][id]


def chat_of(request: ResponsesRequest, items: Sequence[Whole]) -> ChatRequest:
    """The chat whose answer is that of some items, where a request asks for it."""
    told = [Instruction(role="developer", content=request.instructions)] if request.instructions is not None else []
    choice, form = request.tool_choice, request.text.format if request.text else None
    return ChatRequest(
        **{name: getattr(request, name) for name in Generated.model_fields},
        messages=[*told, *messages_of(items)],
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        tools=[Tool(type="function", function=tool) for tool in request.tools] if request.tools else None,
        tool_choice=named(choice.name) if isinstance(choice, ChosenFunction) else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=schema_format(form) if isinstance(form, SchemaText) else form,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def named(function: str) -> ToolChoice:
    return ToolChoice(type="function", function=NamedFunction(name=function))


def schema_format(form: SchemaText) -> ResponseFormat:
    return SchemaFormat(type="json_schema", json_schema=form)


async def read_prompt(service: Service, request: ResponsesRequest, items: list[Whole]) -> tuple[ChatRequest, list[int]]:
    """The chat and its token ids. With truncation: auto, the oldest items are left out until there is room for the answer: for
    as many tokens as it may have, but at most half of the context."""
    limits, engine = service.settings.limits, service.engine

    async def read(items: list[Whole]) -> tuple[ChatRequest, list[int]]:
        chat = chat_of(request, items)
        check_limits(chat, limits)
        return chat, await chat_ids(engine.tokenizer, chat.messages, chat.offered_tools, chat, param="input")

    found = await read(items)
    room = min(request.max_output_tokens or limits.output_tokens, engine.context // 2)
    longest = longest_prompt(engine.context, limits, room)
    if request.truncation != "auto" or len(found[1]) <= longest:
        return found
    fits, most_left = fewest(items), len(items) - 1
    found = await read(latest(items, fits))
    while fits < most_left:
        count = min(2 * fits, (fits + most_left + 1) // 2)  # so that what is tried is never much longer than what fits
        tried = await read(latest(items, count))
        if len(tried[1]) <= longest:
            found, fits = tried, count
        else:
            most_left = count - 1
    return found
