"""The items of which the Responses API makes conversations: messages, calls of functions, their results, thoughts, and
references to items that are stored. Clients send back what they got, so the fields that a server leaves empty are accepted
empty."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tilestack.server.schemas.common import Body, Several

ItemId = Annotated[str, Field(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """A piece of an answer of before; what was told about its tokens is not read again."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[Annotated[InputText | OutputText, Field(discriminator="type")]]
    id: ItemId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # accepted, and not used


class CallItem(Body):
    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")
    id: ItemId | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Several[InputText]
    id: ItemId | None = None
    status: Status | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class ReasoningItem(Body):
    """Thoughts of before. They are read from `content`; nothing here is encrypted, and there are no summaries."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[Any] | None = Field(None, max_length=0)
    content: Several[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None


class ItemReference(Body):
    type: Literal["item_reference"] | None = None
    id: ItemId


def item_type(given: Any) -> str:
    """The type of an item, which may be left out of messages and references."""
    look = given.get if isinstance(given, dict) else lambda name: getattr(given, name, None)
    if isinstance(named := look("type"), str):
        return named
    return "item_reference" if look("id") is not None and look("role") is None else "message"


Whole = MessageItem | CallItem | CallOutputItem | ReasoningItem  # an item that says all by itself
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(item_type),
]
