"""Many prompts at once, offline: `LLM(model).generate(prompts, params)`, `.chat(conversations, params)`, `.embed(texts)`."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilestack.data import Message, Tokenizer
from tilestack.engine.engine import Engine
from tilestack.engine.outputs import Completion, RequestOutput
from tilestack.engine.params import RequestError, SamplingParams, brief
from tilestack.engine.sequence import Request
from tilestack.engine.settings import EngineSettings
from tilestack.garbage import startup_frozen

Prompt = str | Sequence[int]


class LLM:
    """A model that answers lists of prompts, as fast as it can.

    llm = tilestack.LLM("smollm2")
    llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text
    [output.text for output in llm.generate(["Once upon", "In the beginning"], tilestack.SamplingParams(max_tokens=64))]
    """

    def __init__(self, model: "str | Path | Engine", settings: EngineSettings | None = None, **changed: Any):
        """`changed` are settings by name, such as max_sequences=8."""
        if not isinstance(model, Engine):
            given = vars(settings) if settings is not None else {}
            model = Engine.load(model, EngineSettings(**{**given, "queue": None, **changed}))
        self.engine = model
        self.answering = threading.Lock()  # an engine takes one step at a time, so calls of other threads wait

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError("the engine has no tokenizer, so prompts are token ids")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress: bool = True,
    ) -> Any:
        """What follows each prompt, a text or token ids: a RequestOutput for one prompt, a list of them for a list. Calls of
        several threads are answered one after another."""
        ids, one = self.encoded(prompts)
        asked = (
            [params or SamplingParams()] * len(ids)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if wrong := [each for each in asked if not isinstance(each, SamplingParams)]:
            raise TypeError(
                f"params must be SamplingParams, one for all prompts or one for each, not {brief(wrong[0])}"
            )
        if len(asked) != len(ids):
            raise ValueError(f"{len(ids)} prompts and {len(asked)} parameters; give one for all, or one for each")
        requests = [
            Request(f"{number}", prompt, wanted, adapter=adapter)
            for number, (prompt, wanted) in enumerate(zip(ids, asked, strict=True))
        ]
        found = self.run(requests, progress and not one)
        return found[0] if one else found

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        *,
        adapter: str | None = None,
        progress: bool = True,
    ) -> Any:
        """A text as a vector of length 1, by the mean of its tokens' hidden states or by the last; a list for a list."""
        ids, one = self.encoded(texts)
        requests = [Request(f"{number}", text, adapter=adapter, pooling=pooling) for number, text in enumerate(ids)]
        found = [output.completions[0].vector for output in self.run(requests, progress and not one)]
        return found[0] if one else found

    def encoded(self, prompts: Prompt | Sequence[Prompt]) -> tuple[list[list[int]], bool]:
        """Prompts as token ids, and whether one was given instead of a list."""
        given = [prompts] if isinstance(prompts, str) else elements(prompts)
        if one := isinstance(prompts, str) or (len(given) > 0 and isinstance(given[0], int)):
            given = [prompts]
        return [self.tokenizer.encode(each) if isinstance(each, str) else elements(each) for each in given], one

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        adapter: str | None = None,
        progress: bool = True,
    ) -> Any:
        """The model's next turn in a conversation (a list of messages), or in each of several."""
        if isinstance(conversations, str) or not isinstance(conversations, Sequence):
            raise RequestError(
                'a conversation is a list of messages, such as [{"role": "user", "content": "Hello"}], not '
                f"{brief(conversations)}",
                "messages",
            )
        one = len(conversations) > 0 and isinstance(conversations[0], dict)
        given: list[Any] = [conversations] if one else list(conversations)
        if tools and not self.tokenizer.template_reads("tools"):
            raise RequestError("the chat template of this model takes no tools", "tools")
        texts = [self.tokenizer.chat(messages, add_generation_prompt=True, tools=tools) for messages in given]
        ids = [self.tokenizer.encode(text, bare=True) for text in texts]
        found = self.generate(ids, params, adapter=adapter, progress=progress and not one)
        return found[0] if one else found

    def run(self, requests: Iterable[Request], progress: bool = False) -> list[RequestOutput]:
        """Serve requests to their end; an error in one is an error of all, and leaves the engine empty."""
        with self.answering:
            return self.answer(list(requests), progress)

    def answer(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        found = {request: [Completion() for _ in range(request.params.n)] for request in requests}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress)
        with bars, startup_frozen(self.engine.runner.device, collect=False):
            bar = bars.add_task("answering", total=len(requests))
            if progress:  # one bar at a time
                told = lambda what, done, all: bars.update(bar, description=f"answering ({what} {done}/{all})")
                self.engine.runner.report = told
            try:
                for request in requests:
                    self.engine.admission.check(request)
                for request in requests:
                    self.engine.check_queue(request.params.drawn)
                    self.engine.accept(request)
                while self.engine.busy:
                    for request, delta in self.engine.step():
                        if delta.error:
                            failure = RequestError if delta.finish == "refused" else RuntimeError
                            raise failure(f"request {request.id} failed: {delta.error}")
                        found[request][delta.choice].add(delta)
                    if progress:
                        left = len(self.engine.requests)
                        bars.update(bar, description="answering", completed=len(requests) - left)
            finally:
                self.engine.runner.report = None
                for request in requests:
                    self.engine.cancel(request.id)
        return [
            RequestOutput(
                request.id, request.prompt, found[request], self.engine.usage(request),
                request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            )
            for request in requests
        ]  # fmt: skip


def elements(prompts: Any) -> list[Any]:
    """What a list, an array or a tensor of prompts or of token ids holds, its numbers as Python's own."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | Mapping):
        raise RequestError(f"a prompt is a text or token ids, not {brief(prompts)}", "prompt")
    return [each.tolist() if hasattr(each, "tolist") else each for each in prompts]
