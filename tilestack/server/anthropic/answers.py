"""The answer to a chat in Anthropic's words: blocks of content, whole or in events.

Blocks are the items of a response by another name, so they are made of these and of what tells of their growth.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import chain
from typing import Any

from tilestack.engine.outputs import Completion, Delta
from tilestack.server.answer_reader import answer_reader
from tilestack.server.errors import ApiError, anthropic_body
from tilestack.server.events import Answers, encode
from tilestack.server.responses.output import Event, Output
from tilestack.server.running import Running
from tilestack.server.schemas import ChatRequest
from tilestack.server.token_text import TokenTexts

DELTAS = {  # of a block, by the events of a response
    "response.output_text.delta": ("text_delta", "text"),
    "response.reasoning_text.delta": ("thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("input_json_delta", "partial_json"),
}


class AnthropicAnswers(Answers):
    """Shapes what the engine gives for one chat; `shared` is its id and model."""

    def __init__(self, shared: dict[str, Any], chat: ChatRequest, texts: TokenTexts, thinking: bool | None):
        about: Event = {
            "type": "message",
            "role": "assistant",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self.shared = {"id": shared["id"], "model": shared["model"], **about}
        self.output = Output(answer_reader(chat, thinking), texts, thinking)

    def whole(self, completions: Sequence[Completion], running: Running) -> dict[str, Any]:
        (answer,) = completions
        last = Delta(0, tuple(answer.ids), answer.text, finish=answer.finish, stopped_by=answer.stopped_by)
        for _ in self.output.add(last):
            pass
        content = [block_of(item) for item in self.output.items]
        return {**self.shared, "content": content, **self.stop(last), "usage": usage_body(running)}

    async def events(self, running: Running) -> AsyncIterator[bytes]:
        last = None
        async for delta in running.deltas():
            begins = (
                [] if last else [{"type": "message_start", "message": {**self.shared, "usage": usage_body(running)}}]
            )
            told = (event for grown in self.output.add(delta) for event in block_events(grown))
            if written := b"".join(map(event_bytes, chain(begins, told))):
                yield written
            last = delta
        assert last is not None
        ended = {"type": "message_delta", "delta": self.stop(last), "usage": usage_body(running)}
        yield event_bytes(ended) + event_bytes({"type": "message_stop"})

    def failure(self, problem: ApiError) -> bytes:
        return event_bytes(anthropic_body(problem.body()["error"]))

    def stop(self, last: Delta) -> dict[str, Any]:
        """Why an answer has ended."""
        text = last.stopped_by if isinstance(last.stopped_by, str) else None
        called = any(item["type"] == "function_call" for item in self.output.items)
        reason = "tool_use" if called else "end_turn" if text is None else "stop_sequence"
        return {"stop_reason": "max_tokens" if last.finish == "length" else reason, "stop_sequence": text}


def event_bytes(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {encode(event)}\n\n".encode()


def block_events(event: Event) -> Iterator[Event]:
    """What an event of a response is of a block."""
    kind, place = event["type"], {"index": event["output_index"]}
    if kind == "response.output_item.added":
        yield {"type": "content_block_start", **place, "content_block": block_of(event["item"])}
    elif kind == "response.output_item.done":
        yield {"type": "content_block_stop", **place}
    elif kind in DELTAS:
        name, field = DELTAS[kind]
        text = encode(read_input(event["delta"])) if field == "partial_json" else event["delta"]
        yield {"type": "content_block_delta", **place, "delta": {"type": name, field: text}}


def block_of(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": read_input(item["arguments"])}
    text = "".join(part["text"] for part in item["content"])
    if item["type"] == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def read_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which are an object here, even where a model has written something else."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = arguments
    return read if isinstance(read, dict) else {"arguments": read}


def usage_body(running: Running) -> dict[str, Any]:
    used = running.usage
    cached = {"cache_read_input_tokens": used.cached, "cache_creation_input_tokens": 0}
    return {"input_tokens": used.prompt - used.cached, **cached, "output_tokens": used.completion}
