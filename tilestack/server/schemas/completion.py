"""`POST /v1/completions`: texts or token ids to be continued as they are."""

from typing import Annotated

from pydantic import Field, model_validator

from tilestack.server.schemas.common import Sampled, Several, clash

TokenIds = Annotated[Several[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Texts = (
    str | Annotated[Several[str], Field(min_length=1)] | TokenIds | Annotated[Several[TokenIds], Field(min_length=1)]
)


class CompletionRequest(Sampled):
    """One prompt, or several that are answered each for itself."""

    prompt: Texts
    max_tokens: int | None = Field(None, ge=0, description="Tokens of each answer; 0 with echo: the prompt alone.")
    best_of: int | None = Field(None, ge=1, description="Answers to draw, of which the n likeliest are given.")
    echo: bool | None = Field(None, description="Give the prompt before the answer.")
    logprobs: int | None = Field(None, ge=0, description="Tell log-probabilities, and those of this many likeliest.")
    suffix: None = Field(None, description="Not supported: no served model fills in the middle.")

    @model_validator(mode="after")
    def fields_agree(self) -> "CompletionRequest":
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise clash("best_of", "best_of cannot be streamed: which answers are the likeliest is known at the end")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise clash("best_of", f"best_of is {self.best_of}, fewer than the {self.n} answers to give")
        if self.stream and self.echo and self.logprobs is not None:
            raise clash("echo", "echo with logprobs cannot be streamed")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise clash("max_tokens", "max_tokens: 0 tells of the prompt alone, which takes echo: true and no stream")
        return self


def as_list(given: Texts) -> list[str] | list[list[int]]:
    """The prompts of a request, be they texts or ids, one or several."""
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else given  # type: ignore[list-item, return-value]
