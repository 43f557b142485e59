"""`POST /tokenize` and `POST /detokenize`: what the model reads, as vLLM tells it."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from tilestack.server.schemas.chat import Message, Templated
from tilestack.server.schemas.common import Body, Several, clash


class TokenizeRequest(Templated):
    """A text, or a conversation by the chat template."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})
    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around texts; true when left out, for messages false."
    )
    return_token_strs: bool | None = Field(None, description="Give each token as the vocabulary writes it, too.")

    @model_validator(mode="after")
    def one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise clash("prompt", "give either prompt or messages")
        for name in Templated.model_fields if self.messages is None else ():
            if getattr(self, name) is not None:
                raise clash(name, f"{name} is for messages, and prompt is a text as it is")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Several[Annotated[int, Field(ge=0, lt=2**31)]]
