"""What a request may ask for, checked before anything is done for it; each refusal names the limit."""

import json
from typing import Any

from tilestack.server.errors import ApiError, refuse
from tilestack.server.sampling import calls_strictly, must_call
from tilestack.server.schemas.chat import ChatRequest
from tilestack.server.schemas.common import Sampled
from tilestack.server.schemas.completion import CompletionRequest
from tilestack.server.settings import Limits

OVER = "over_limit"


def check_limits(request: Sampled, limits: Limits, prompts: int = 1) -> None:
    """Refuse a request that asks for more than the server gives."""
    most(limits.prompts, prompts, "prompt", "prompts in a request")
    most(limits.choices, request.n or 1, "n", "answers")
    most(limits.stops, len(request.stops), "stop", "stop texts")
    for text in request.stops:
        most(limits.stop_characters, len(text), "stop", "characters in a stop text")
    most(limits.biases, len(request.logit_bias or ()), "logit_bias", "tokens with a bias")
    most(limits.logprobs, request.prompt_logprobs or 0, "prompt_logprobs", "likeliest tokens told")
    most(limits.output_tokens, request.max_tokens or 0, "max_tokens", "tokens of an answer")
    if forms := request.structured_outputs:
        most_structure(limits, [forms.json_, forms.regex, forms.choice, forms.grammar], "structured_outputs")
    if isinstance(request, ChatRequest):
        most(limits.messages, len(request.messages), "messages", "messages")
        most(limits.tools, len(request.tools or ()), "tools", "tools")
        if must_call(request) or calls_strictly(request):
            most_structure(limits, [tool.function.parameters for tool in request.tools or ()], "tools")
        most(limits.logprobs, request.top_logprobs or 0, "top_logprobs", "likeliest tokens told")
        most(limits.output_tokens, request.max_completion_tokens or 0, "max_completion_tokens", "tokens of an answer")
        most_structure(limits, request.response_format and request.response_format.model_dump(), "response_format")
    if isinstance(request, CompletionRequest):
        most(limits.choices, request.best_of or 1, "best_of", "answers drawn")
        most(limits.logprobs, request.logprobs or 0, "logprobs", "likeliest tokens told")


def most(limit: int, given: int, param: str, what: str) -> None:
    if given > limit:
        raise refuse(f"{given:,} {what}; this server gives at most {limit:,}", param, OVER)


def most_structure(limits: Limits, form: Any, param: str) -> None:
    if form is not None:
        try:
            size = len(json.dumps(form))
        except RecursionError:
            raise refuse(f"{param} is nested too deeply", param) from None
        most(limits.structure_characters, size, param, "characters of structure")


def check_prompt(ids: list[int], context: int, limits: Limits, param: str, room: int = 1) -> None:
    """Refuse a prompt that is empty, or too long to be answered."""
    if not ids:
        raise refuse(f"{param} has no tokens", param, "empty_prompt")
    longest = longest_prompt(context, limits, room)
    if len(ids) > longest:
        # In OpenAI's words, by which clients know that the conversation has to become shorter.
        raise ApiError(
            400,
            f"this model's maximum context length is {context:,} tokens, of which a prompt may have {longest:,}; this one "
            f"has {len(ids):,}",
            param=param,
            code="context_length_exceeded",
        )


def longest_prompt(context: int, limits: Limits, room: int) -> int:
    """The most tokens of a prompt after which there is so much room for an answer."""
    return min(context - room, limits.prompt_tokens or context)
