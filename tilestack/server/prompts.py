"""From what a client sends to token ids: conversations through the model's chat template, texts through its tokenizer.

Templates and long texts run in threads, so that they hold up nobody else; a short text is done before a thread has begun.
Templates are programs by strangers; `tilestack.data.chat` renders them in a process of its own with limits of memory and time.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from tilestack.data import Tokenizer
from tilestack.data.errors import DataError
from tilestack.server.errors import refuse
from tilestack.server.schemas.chat import AssistantMessage, Message, Templated, Tool, ToolCall, ToolMessage

SHORT = 512  # characters that take as long to tokenise as to hand to a thread
RESERVED = {"messages", "tools", "add_generation_prompt"}


async def text_ids(tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]], param: str) -> list[list[int]]:
    """The ids of texts; ids are taken as they are."""

    def encode() -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    return await encoded(encode, param, at_once=sum(len(text) for text in prompts if isinstance(text, str)) <= SHORT)


async def chat_ids(
    tokenizer: Tokenizer,
    conversation: Sequence[Message],
    tools: Sequence[Tool] | None,
    options: Templated,
    add_special_tokens: bool = False,
    param: str = "messages",
) -> list[int]:
    """The ids of a conversation, up to where the answer begins."""
    variables = dict(options.chat_template_kwargs or {})
    if taken := RESERVED & set(variables):
        raise refuse(f"chat_template_kwargs must not set {', '.join(sorted(taken))}", "chat_template_kwargs")
    if tools:
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    if options.reasoning_effort:
        variables["reasoning_effort"] = options.reasoning_effort
    messages = [template_message(message) for message in conversation]
    continues = bool(options.continue_final_message)
    if continues and messages[-1].get("tool_calls"):  # written after what it says, and so they would be cut off
        raise refuse(
            "the last message ends with calls of functions, and cannot be continued; give their results after it",
            "continue_final_message",
        )
    begins = options.add_generation_prompt is not False and not continues

    def encode() -> list[int]:
        for name in {"tools", "reasoning_effort"} & set(variables):
            if not tokenizer.template_reads(name):
                raise refuse(f"the chat template of this model takes no {name}", name, "unsupported_parameter")
        if any("tool_calls" in each for each in messages) and not tokenizer.template_reads("tool_calls"):
            raise refuse("the chat template of this model writes no calls of tools, and messages have some", "messages")
        if continues:
            text = up_to_last_word(tokenizer, messages, variables)
        else:
            text = tokenizer.chat(messages, add_generation_prompt=begins, **variables)
        return tokenizer.encode(text, bare=not add_special_tokens)

    return await encoded(encode, param)


def up_to_last_word(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """A conversation up to the end of what its last message says: a mark is put there, and the text cut at the mark."""
    mark = f"\ufdd0{os.urandom(8).hex()}\ufdd1"
    marked = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + mark}]
    before, found, _ = tokenizer.chat(marked, **variables).partition(mark)
    if not found:
        raise refuse("the chat template does not write the last message's content", "continue_final_message")
    return before


async def warm_up(tokenizer: Tokenizer) -> None:
    """Start the processes that render templates, so that the first conversation need not wait for them."""
    with suppress(DataError):  # a model that was not taught to converse is served all the same
        await asyncio.to_thread(tokenizer.chat, [{"role": "user", "content": "hello"}], add_generation_prompt=True)


async def encoded(encode: Any, param: str, at_once: bool = False) -> Any:
    try:
        return encode() if at_once else await asyncio.to_thread(encode)
    except (UnicodeEncodeError, TypeError) as problem:  # half of a surrogate pair, which JSON can say and text cannot
        raise refuse(f"{param} holds what is not text: {problem}", param) from problem
    except DataError as problem:  # of a template, or of what it makes of these messages
        raise refuse(str(problem), param) from problem


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates read it: content as one text, arguments of calls as objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = plain_text(message.content)
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            found["tool_calls"] = [template_call(call) for call in message.tool_calls]
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
    return found


class WithText(Protocol):
    @property
    def text(self) -> str: ...


def plain_text(content: str | Sequence[WithText] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def template_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refuse(f"the arguments of the call {call.id!r} are not a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
