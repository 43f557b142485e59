"""`POST /v1/messages`: a conversation in the words of Anthropic's API, which many coding agents speak."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tilestack.server.schemas.chat import Effort, FunctionName, check_choice, refuse_hosted
from tilestack.server.schemas.common import Body, Several, clash


class Cacheable(Body):
    cache_control: dict[str, Any] | None = Field(None, description="Accepted; all prefixes are remembered anyway.")


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: None = None


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Several[TextBlock] | None = None
    is_error: bool | None = Field(None, description="Accepted; the model reads it from the content.")


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | Several[Block]


class ClientTool(Cacheable):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def is_the_clients(cls, given: Any) -> Any:
        return refuse_hosted(given, "custom")


class ToolUse(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class Metadata(Body):
    user_id: str | None = None


class SchemaOutput(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = Field(None, description="Only for models whose chat template reads it.")
    format: SchemaOutput | None = Field(None, description="The form of the answer.")


class CountRequest(Cacheable):
    """A conversation as the model reads it."""

    model: str | None = Field(None, description="The served model, or one of its adapters; the model when left out.")
    messages: Annotated[Several[Turn], Field(min_length=1)] = Field(
        description="An assistant's last turn is continued where it ends."
    )
    system: str | Several[TextBlock] | None = None
    tools: Several[ClientTool] | None = None
    tool_choice: ToolUse | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = Field(None, description="Accepted; a model thinks as its chat template says.")

    @model_validator(mode="after")
    def choice_is_among_the_tools(self) -> "CountRequest":
        if self.tool_choice is not None:
            if (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
                raise clash("tool_choice", "tool_choice has a name where its type is tool, and only there")
            names = [tool.name for tool in self.tools or ()]
            check_choice(self.tool_choice.name, self.tool_choice.type == "any", names)
        return self


class MessagesRequest(CountRequest):
    """A conversation to be continued by the assistant."""

    max_tokens: int = Field(ge=1, description="Tokens of the answer, thoughts included.")
    stop_sequences: Several[str] | None = Field(None, description="Texts before which the answer ends.")
    temperature: float | None = Field(None, description="0 takes the likeliest token each time.")
    top_p: float | None = Field(None, description="Draw from the likeliest tokens that have this share together.")
    top_k: int | None = Field(None, description="Draw from the k likeliest tokens; 0 or -1 for all.")
    stream: bool | None = Field(None, description="Send the answer as it comes, in server-sent events.")
    metadata: Metadata | None = Field(None, description="Accepted for Anthropic's clients; not used.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="There is one tier.")
