"""`POST /v1/embeddings`: texts or token ids as vectors."""

from typing import Literal

from pydantic import Field

from tilestack.server.schemas.common import Body
from tilestack.server.schemas.completion import Texts


class EmbeddingRequest(Body):
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = Field(
        None, description="Over the tokens' hidden states; mean when left out."
    )
    dimensions: None = Field(None, description="Not supported: vectors have the model's width.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="As the engine orders requests.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Texts share cached prefixes only with those of the same salt."
    )
    user: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")
