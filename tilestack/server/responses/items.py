"""Items as the rest of the server knows them: as messages of a chat, and as JSON that is stored and listed."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from tilestack.server.errors import refuse
from tilestack.server.prompts import plain_text
from tilestack.server.schemas.chat import (
    AssistantMessage,
    CalledFunction,
    Instruction,
    Message,
    ToolCall,
    ToolMessage,
)
from tilestack.server.schemas.items import CallItem, CallOutputItem, Item, MessageItem, ReasoningItem, Whole

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
LIST: TypeAdapter[list[Any]] = TypeAdapter(list[Item])  # as they are stored, where none is a reference


def new_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


@dataclass
class Turn:
    """What an assistant does until it is somebody else's turn: one message to a chat template, and several items."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def goes_on_with(self, item: Whole) -> bool:
        """Thoughts come first. Text that follows text is another message, unless a call stands between."""
        if isinstance(item, ReasoningItem):
            return not self.texts and not self.calls
        return isinstance(item, CallItem) or not self.texts or bool(self.calls)

    def add(self, item: Whole) -> None:
        if isinstance(item, ReasoningItem):
            self.thoughts += [part.text for part in item.content or ()]
        elif isinstance(item, CallItem):
            called = CalledFunction(name=item.name, arguments=item.arguments)
            self.calls.append(ToolCall(id=item.call_id, type="function", function=called))
        elif isinstance(item, MessageItem):
            self.texts.append(plain_text(item.content))

    def message(self) -> AssistantMessage:
        text = None if self.calls and not self.texts else "".join(self.texts)
        thoughts = "".join(self.thoughts) if self.thoughts else None
        return AssistantMessage(
            role="assistant", content=text, tool_calls=self.calls or None, reasoning_content=thoughts
        )


def messages_of(items: Iterable[Whole]) -> list[Message]:
    """A conversation in items as messages of a chat."""
    found: list[Message] = []
    turn: Turn | None = None
    called: set[str] = set()
    for item in items:
        said = isinstance(item, ReasoningItem | CallItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if turn is not None and not (said and turn.goes_on_with(item)):
            found.append(turn.message())
            turn = None
        if said:
            turn = turn or Turn()
            turn.add(item)
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem):
            if item.call_id not in called:
                raise refuse(f"no call before it has the call_id {item.call_id!r} of a function_call_output", "input")
            found.append(ToolMessage(role="tool", content=plain_text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            found.append(Instruction(role=item.role, content=plain_text(item.content)))
    return found if turn is None else [*found, turn.message()]


def latest(items: Sequence[Whole], count: int) -> list[Whole]:
    """The last so many items, without the results of calls that are not among them."""
    kept = items[len(items) - count :]
    called = {item.call_id for item in kept if isinstance(item, CallItem)}
    return [item for item in kept if not isinstance(item, CallOutputItem) or item.call_id in called]


def fewest(items: Sequence[Whole]) -> int:
    """How many of the last items are the least that can be answered: one, or from a call to its result."""
    if not isinstance(last := items[-1], CallOutputItem):
        return 1
    called = [isinstance(item, CallItem) and item.call_id == last.call_id for item in reversed(items)]
    return called.index(True) + 1


def stored_form(item: Whole) -> dict[str, Any]:
    """An item as it is stored and listed, with an id and its text in parts."""
    kind = item.type or "message"
    form: dict[str, Any] = {"id": item.id or new_id(kind), "type": kind, "status": item.status or "completed"}
    if isinstance(item, MessageItem):
        texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
        part = output_text if item.role == "assistant" else input_text
        return form | {"role": item.role, "content": [part(text) for text in texts]}
    if isinstance(item, CallItem):
        return form | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if isinstance(item, CallOutputItem):
        told = item.output if isinstance(item.output, str) else [input_text(part.text) for part in item.output]
        return form | {"call_id": item.call_id, "output": told}
    return form | {"summary": [], "content": [reasoning_text(part.text) for part in item.content or ()]}


def input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
