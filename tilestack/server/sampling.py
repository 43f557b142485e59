"""From a request's fields to the engine's parameters. What was left out takes the engine's defaults."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tilestack.engine.params import SamplingParams, Structure
from tilestack.server.errors import refuse
from tilestack.server.schemas.chat import ChatRequest, Function, SchemaFormat, ToolChoice
from tilestack.server.schemas.common import Sampled, StructuredOutputs
from tilestack.server.schemas.completion import CompletionRequest
from tilestack.server.tools import CLOSE, OPEN

SAME = {field.name for field in fields(SamplingParams)} - {"stop", "stop_ids", "logit_bias", "logprobs", "structure"}
NONE: Mapping[str, float] = {}
COMPLETION_TOKENS = 16  # OpenAI's default for completions


def common_params(request: Sampled, defaults: Mapping[str, float], **others: Any) -> dict[str, Any]:
    """The parameters that both kinds of request name alike, or else their defaults, and `others`."""
    given = {name: value for name in SAME if (value := getattr(request, name, None)) is not None}
    if request.top_k == -1:  # vLLM's word for all
        given["top_k"] = 0
    given |= {name: value for name, value in others.items() if value is not None}
    return {**defaults, **given} | dict(
        stop=request.stops,
        stop_ids=tuple(request.stop_token_ids or ()),
        keep_stop=bool(request.include_stop_str_in_output),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
    )


def completion_params(request: CompletionRequest, room: int, defaults: Mapping[str, float] = NONE) -> SamplingParams:
    """For a prompt after which there is room for so many tokens."""
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    structure = structure_of(request.structured_outputs) if request.structured_outputs else None
    wanted = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return SamplingParams(
        **common_params(
            request,
            defaults,
            max_tokens=min(max(wanted, 1), room),  # of a request for none, the token that is drawn is not told
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
        )
    )


def chat_params(request: ChatRequest, room: int, most: int, defaults: Mapping[str, float] = NONE) -> SamplingParams:
    """For a conversation after which there is room for so many tokens; one that names no limit gets `most`."""
    wanted = request.max_completion_tokens or request.max_tokens or most
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(
        **common_params(
            request, defaults, max_tokens=min(wanted, room), logprobs=logprobs, structure=chat_structure(request)
        )
    )


def chat_structure(request: ChatRequest) -> Structure | None:
    """The form of a chat's answer, from the one field that asks for it."""
    forms = []
    if has_response_form(request):
        forms.append(response_structure(request.response_format))
    if request.structured_outputs:
        forms.append(structure_of(request.structured_outputs))
    try:
        if must_call(request):
            forms.append(Structure("json_schema", json.dumps(call_schema(callable_tools(request)))))
        elif calls_strictly(request):
            forms.append(Structure("grammar", strict_calls(callable_tools(request))))
    except RecursionError:
        raise refuse("the parameters of a tool are nested too deeply", "tools") from None
    if len(forms) > 1:
        raise refuse("one of response_format, structured_outputs and a tool that must be called, not several")
    return forms[0] if forms else None


def structure_field(request: Sampled) -> str:
    """The field of a request that asks for the form of its answer."""
    if request.structured_outputs:
        return "structured_outputs"
    return "response_format" if isinstance(request, ChatRequest) and has_response_form(request) else "tools"


def has_response_form(request: ChatRequest) -> bool:
    return request.response_format is not None and request.response_format.type != "text"


def response_structure(form: Any) -> Structure:
    if isinstance(form, SchemaFormat):
        return Structure("json_schema", json.dumps(form.json_schema.schema_))
    return Structure("json")


def structure_of(form: StructuredOutputs) -> Structure:
    if form.json_ is not None:
        return Structure("json_schema", form.json_ if isinstance(form.json_, str) else json.dumps(form.json_))
    if form.choice is not None:
        return Structure("regex", "|".join(f"({re.escape(text)})" for text in form.choice))
    if form.regex is not None:
        return Structure("regex", form.regex)
    return Structure("grammar", form.grammar or "")


def must_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)


def calls_strictly(request: ChatRequest) -> bool:
    """Whether the answer is text in which a tool may be called, and then by its schema: no other form is asked for."""
    if must_call(request) or request.structured_outputs or has_response_form(request):
        return False
    return request.tool_choice != "none" and any(tool.function.strict for tool in request.tools or ())


def callable_tools(request: ChatRequest) -> list[Function]:
    """Those of a request, or the one that was chosen."""
    chosen = request.tool_choice.function.name if isinstance(request.tool_choice, ToolChoice) else None
    return [tool.function for tool in request.tools or () if chosen in (None, tool.function.name)]


def call_schema(tools: Sequence[Function]) -> dict[str, Any]:
    """The JSON of a call of one of some tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": moved_to(f"#/anyOf/{number}/properties/arguments", tool.parameters or {"type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    return {"anyOf": calls}


def strict_calls(tools: Sequence[Function]) -> str:
    """A grammar of text and calls in any order: text is free, and what follows the mark of a call is one. Of tools that are
    not strict, the arguments are any object."""
    known = [tool if tool.strict else tool.model_copy(update={"parameters": None}) for tool in tools]
    return f"""start: (before call)* TEXT
before[lazy]: TEXT {json.dumps(OPEN)}
call: SPACE %json {json.dumps(call_schema(known))} SPACE {json.dumps(CLOSE)}
SPACE: /[ \\n]{{0,4}}/
TEXT: /(.|\\n)*/
"""


def moved_to(place: str, schema: Any) -> Any:
    """A schema as part of another: what it refers to within itself is now below that place."""
    if isinstance(schema, list):
        return [moved_to(place, each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    refers = lambda key, value: key == "$ref" and isinstance(value, str) and value.startswith("#")
    return {key: place + value[1:] if refers(key, value) else moved_to(place, value) for key, value in schema.items()}
