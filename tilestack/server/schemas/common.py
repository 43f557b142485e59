"""The fields that requests for text share: how tokens are drawn, when to end, and in which form."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

CLASH = "fields_clash"
Entry = TypeVar("Entry")
# Of a list, the first wrong entry is told: to tell of a million would take seconds, in which nobody else is served.
Several = Annotated[list[Entry], Field(fail_fast=True)]


class Body(BaseModel):
    """No field but those declared, and no text where a number is meant."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def clash(param: str, message: str) -> PydanticCustomError:
    """The error of fields that do not go together; `param` is the one to change."""
    return PydanticCustomError(CLASH, "{message}", {"message": message, "param": param})


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="A last event tells what the request cost in tokens.")
    continuous_usage_stats: bool | None = Field(None, description="So does every event, as far as it has come.")
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """A form for the answer, in vLLM's words; one of them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression.")
    choice: Several[str] | None = Field(None, description="One of these texts.", min_length=1)
    grammar: str | None = Field(None, description="A Lark grammar.")

    @model_validator(mode="after")
    def one_form(self) -> "StructuredOutputs":
        given = [form for form in (self.json_, self.regex, self.choice, self.grammar) if form is not None]
        if len(given) != 1:
            raise clash(
                "structured_outputs", f"must hold one of json, regex, choice and grammar, and holds {len(given)}"
            )
        return self


class Generated(Body):
    """What every kind of generation takes. The ranges of numbers are `SamplingParams`'."""

    model: str | None = Field(None, description="The served model, or one of its adapters; the model when left out.")
    temperature: float | None = Field(None, description="0 takes the likeliest token each time; 1 when left out.")
    top_p: float | None = Field(None, description="Draw from the likeliest tokens that have this share together.")
    top_k: int | None = Field(None, description="Draw from the k likeliest tokens; 0 or -1 for all.")
    min_p: float | None = Field(None, description="Leave out tokens less likely than this fraction of the likeliest.")
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], float] | None = Field(
        None, description="Added to the logits of tokens, by id."
    )
    seed: int | None = Field(None, description="The same seed gives the same text.")
    min_tokens: int | None = Field(None, ge=0, description="Nothing ends the answer before this many.")
    stop: str | Several[str] | None = Field(None, description="Texts before which the answer ends.")
    stop_token_ids: Several[int] | None = Field(None, description="Tokens with which the answer ends.", max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = Field(None, description="Go on where the model would end.")
    stream: bool | None = Field(None, description="Send the answer as it comes, in server-sent events.")
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="As the engine orders requests.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Prompts share cached prefixes only with those of the same salt."
    )
    user: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Sampled(Generated):
    """What chats and completions take besides."""

    n: int | None = Field(None, ge=1, description="Answers to give.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens of each answer.")
    prompt_logprobs: int | None = Field(None, ge=0, description="Tell the prompt's log-probabilities too.")
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def stream_options_need_a_stream(self) -> "Sampled":
        if self.stream_options is not None and not self.stream:
            raise clash("stream_options", "stream_options are for stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise clash("prompt_logprobs", "prompt_logprobs cannot be streamed")
        return self
