"""`POST /v1/chat/completions`: a conversation, and the functions that may be called in it."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tilestack.server.schemas.common import Body, Sampled, Several, clash


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Several[TextPart]


class CalledFunction(Body):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class Instruction(Body):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Body):
    """An answer of before. Clients send back what they got, so the fields that a server leaves empty are accepted empty."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Several[ToolCall] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def says_something(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls:
            raise clash("messages", "an assistant's message needs content or tool_calls")
        return self


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[Instruction | AssistantMessage | ToolMessage, Field(discriminator="role")]


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(None, description="true: the arguments of a call keep to the schema.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class PlainFormat(Body):
    type: Literal["text", "json_object"]


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(Body):
    """What a chat template reads besides messages."""

    tools: Several[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: Effort | None = Field(None, description="Only for models whose chat template reads it.")
    add_generation_prompt: bool | None = Field(None, description="false: no new turn of the assistant is begun.")
    continue_final_message: bool | None = Field(None, description="true: go on with the last message where it ends.")

    @model_validator(mode="after")
    def begin_or_continue(self) -> "Templated":
        if self.add_generation_prompt and self.continue_final_message:
            raise clash(
                "continue_final_message",
                "continue_final_message goes on with a turn and add_generation_prompt begins one; give one of them",
            )
        return self


class ChatRequest(Sampled, Templated):
    """A conversation to be continued by the assistant."""

    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Tell each token's log-probability.")
    top_logprobs: int | None = Field(None, ge=0, description="And those of this many likeliest in its place.")
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: only the first call is given.")
    response_format: ResponseFormat | None = None
    # OpenAI's clients send these; they change no answer, and nothing is made of them.
    store: Literal[False] | None = Field(None, description="No chat is stored, so true is refused.")
    metadata: dict[str, str] | None = Field(None, description="Accepted for OpenAI's clients; not used.")
    modalities: list[Literal["text"]] | None = Field(None, description="Text is what there is.")
    prompt_cache_key: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")
    prompt_cache_retention: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")
    safety_identifier: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier, the default.")

    @property
    def offered_tools(self) -> list[Tool] | None:
        return None if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def fields_agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise clash("top_logprobs", "top_logprobs need logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise clash("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None
        check_choice(chosen, self.tool_choice == "required", [tool.function.name for tool in self.tools or ()])
        return self


def refuse_hosted(tool: Any, accepted: str) -> Any:
    """Refuse by its name a tool that a provider runs itself; those of clients have the accepted type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != accepted:
        raise clash("tools", f"{kind[:80]!r} is not supported: the server runs no tools itself; give functions")
    return tool


def check_choice(chosen: str | None, required: bool, names: Sequence[str]) -> None:
    """Refuse a choice of tools of which there are none: one by name, or that any be called."""
    if chosen is not None and chosen not in names:
        raise clash("tool_choice", f"tool_choice names {chosen!r}, which is not among the tools")
    if required and not names:
        raise clash("tool_choice", "tool_choice is required, and there are no tools")
