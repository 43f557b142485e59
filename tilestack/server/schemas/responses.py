"""`POST /v1/responses`: a conversation in items, which may go on from an answer that is stored."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from tilestack.server.schemas.chat import Effort, Function, JsonSchema, PlainFormat, check_choice, refuse_hosted
from tilestack.server.schemas.common import Body, Generated, Several, clash
from tilestack.server.schemas.items import Item

LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def is_a_function(cls, given: Any) -> Any:
        return refuse_hosted(given, "function")


class ChosenFunction(Body):
    type: Literal["function"]
    name: str


class SchemaText(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: Effort | None = Field(None, description="Only for models whose chat template reads it.")
    summary: None = Field(None, description="Not supported: thoughts are given as they are.")


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Generated):
    """Items to be answered by the assistant."""

    input: str | Annotated[Several[Item], Field(min_length=1)] = Field(description="A text or items.")
    instructions: str | None = Field(
        None, description="What a system message says; not carried over to later responses."
    )
    previous_response_id: str | None = Field(
        None, max_length=128, description="A stored response, after which the input comes."
    )
    store: bool | None = Field(None, description="false: keep nothing of it; true when left out.")
    max_output_tokens: int | None = Field(None, ge=1, description="Tokens of the answer, thoughts included.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    tools: Several[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: only the first call is given.")
    reasoning: ReasoningOptions | None = None
    include: Several[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, description="Tell those of this many likeliest tokens.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest items of a conversation that is too long."
    )
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="Given back with the response.")
    # OpenAI's clients send these; they change no answer.
    background: Literal[False] | None = Field(None, description="Not supported: an answer is made while one waits.")
    conversation: None = Field(None, description="Not supported; previous_response_id continues a conversation.")
    prompt: None = Field(None, description="Not supported: the server has no prompt templates.")
    max_tool_calls: None = Field(None, description="Not supported: it is for tools of OpenAI's own.")
    prompt_cache_key: str | None = Field(None, max_length=512, description="Given back; not used.")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description="Given back; not used.")
    safety_identifier: str | None = Field(None, max_length=512, description="Given back; not used.")
    user: str | None = Field(None, max_length=512, description="Given back; not used.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier, the default.")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def fields_agree(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise clash("stream_options", "stream_options are for stream: true")
        if self.top_logprobs and not self.wants_logprobs:
            raise clash("top_logprobs", f"top_logprobs need include: [{LOGPROBS!r}]")
        chosen = self.tool_choice.name if isinstance(self.tool_choice, ChosenFunction) else None
        check_choice(chosen, self.tool_choice == "required", [tool.name for tool in self.tools or ()])
        return self


class ItemsQuery(Body):
    """Which of a response's input items are listed."""

    model_config = ConfigDict(strict=False)  # what stands in an address is text
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="desc: the latest first.")
    after: str | None = Field(None, description="Those that follow this item.")
