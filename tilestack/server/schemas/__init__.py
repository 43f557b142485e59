"""What a client may send. A field that is not here is refused, rather than ignored: an answer that silently lacks what
was asked for is worse than none."""

from tilestack.server.schemas.anthropic import CountRequest, MessagesRequest
from tilestack.server.schemas.chat import ChatRequest
from tilestack.server.schemas.completion import CompletionRequest
from tilestack.server.schemas.embedding import EmbeddingRequest
from tilestack.server.schemas.responses import ResponsesRequest
from tilestack.server.schemas.tokens import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "CountRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "MessagesRequest",
    "ResponsesRequest",
    "TokenizeRequest",
]
