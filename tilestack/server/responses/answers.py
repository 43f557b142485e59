"""The answer to a request for a response, whole or in typed events that are numbered."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import Any

from tilestack.engine.outputs import Completion, Delta, Usage
from tilestack.engine.params import SamplingParams
from tilestack.server.answer_reader import answer_reader
from tilestack.server.errors import ApiError, refuse
from tilestack.server.events import Answers, encode
from tilestack.server.responses.output import Event, Output
from tilestack.server.running import Running
from tilestack.server.schemas import ChatRequest, ResponsesRequest
from tilestack.server.schemas.chat import PlainFormat
from tilestack.server.schemas.responses import FunctionTool, SchemaText
from tilestack.server.token_text import TokenTexts

Body = dict[str, Any]
MARGIN = 64  # levels of nesting, since what is written here is written again where the stack is deeper


class ResponseAnswers(Answers):
    """Shapes what the engine gives for one response; `shared` is all that is known of it before. `keep` is given the response
    when it has ended, before the client is."""

    def __init__(
        self,
        shared: Body,
        chat: ChatRequest,
        texts: TokenTexts,
        thinking: bool | None,
        keep: Callable[[Body], None],
    ):
        self.shared, self.keep = shared, keep
        self.output = Output(answer_reader(chat, thinking), texts, thinking)
        self.events_told = 0

    def whole(self, completions: Sequence[Completion], running: Running) -> Body:
        (answer,) = completions
        for _ in self.output.add(Delta(0, tuple(answer.ids), answer.text, tuple(answer.logprobs), answer.finish)):
            pass
        return self.ended(answer.finish, running)

    async def events(self, running: Running) -> AsyncIterator[bytes]:
        begins: list[Event] = [
            {"type": f"response.{name}", "response": self.shared} for name in ("created", "in_progress")
        ]
        finish = None
        async for delta in running.deltas():
            if told := b"".join(map(self.written, chain(begins, self.output.add(delta)))):
                yield told
            begins, finish = [], delta.finish
        body = self.ended(finish, running)
        yield self.written({"type": f"response.{body['status']}", "response": body})

    def written(self, event: Event) -> bytes:
        numbered = encode(event | {"sequence_number": self.events_told})
        self.events_told += 1
        return f"event: {event['type']}\ndata: {numbered}\n\n".encode()

    def ended(self, finish: str | None, running: Running) -> Body:
        cut = finish == "length"
        body = self.shared | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output.items,
            "usage": usage_body(running.usage, self.output.reasoning_tokens),
        }
        self.keep(body)
        return body

    def failure(self, problem: ApiError) -> bytes:
        for _ in self.output.close("incomplete"):
            pass
        said = str(problem.detail)
        error = {"code": "server_error" if problem.status_code >= 500 else "invalid_prompt", "message": said}
        failed = self.shared | {"status": "failed", "error": error, "output": self.output.items}
        return self.written(
            {"type": "error", "code": problem.code, "message": said, "param": problem.param}
        ) + self.written({"type": "response.failed", "response": failed})


def usage_body(usage: Usage, reasoning: int) -> Body:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion)},
        "total_tokens": usage.prompt + usage.completion,
    }


def shared_body(request: ResponsesRequest, model: str, params: SamplingParams, store: bool) -> Body:
    """A response before its answer: the request, with what was left out as it is taken."""
    form = request.text.format if request.text else None
    body = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": {"format": form_body(form), "verbosity": "medium"},
        "tool_choice": choice_body(request),
        "tools": [tool_body(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
    nested: Any = body
    for _ in range(MARGIN):
        nested = [nested]
    try:
        json.dumps(nested, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise refuse("what is to be given back with the response is nested too deeply", "tools") from None
    except ValueError as problem:  # half of a surrogate pair, or a number that is none
        raise refuse(f"what is to be given back with the response cannot be written: {problem}") from problem
    return body


def form_body(form: PlainFormat | SchemaText | None) -> Body:
    if not isinstance(form, SchemaText):
        return {"type": form.type if form else "text"}
    about = {"name": form.name, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", **about, "schema": form.schema_}


def tool_body(tool: FunctionTool) -> Body:
    about = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", **about, "parameters": tool.parameters}


def choice_body(request: ResponsesRequest) -> Body | str:
    choice = request.tool_choice or "auto"
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.name}
