"""The answers to prompts, whole or in events: text, the prompt before it where echoed, log-probabilities."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any

from tilestack.engine.outputs import Completion, Delta, TokenLogprob
from tilestack.server.events import DONE, Answers, Chunks
from tilestack.server.running import Running, usage_body
from tilestack.server.schemas import CompletionRequest
from tilestack.server.token_text import TokenTexts


@dataclass(frozen=True)
class CompletionAnswers(Answers):
    """Shapes what the engine gives for the prompts of one request; `shared` is its id, time and model."""

    request: CompletionRequest
    texts: TokenTexts
    shared: dict[str, Any]
    prompts: Sequence[str]  # as text, where they are to be echoed

    def whole(self, completions: Sequence[Completion], running: Running) -> dict[str, Any]:
        return {
            **self.shared,
            "object": "text_completion",
            "choices": [self.choice(number, completion, running) for number, completion in enumerate(completions)],
            "usage": usage_body(replace(running.usage, completion=0) if self.prompt_only else running.usage),
        }

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is told but the prompt; the engine draws a token all the same."""
        return self.request.max_tokens == 0

    def choice(self, number: int, completion: Completion, running: Running) -> dict[str, Any]:
        if self.prompt_only:
            completion = Completion(finish="length")
        prompt = number // (self.request.n or 1)
        stream, (ids, _) = running.streams[prompt], running.prompts[prompt]
        told: list[TokenLogprob | None] = list(completion.logprobs)
        echoed = self.echoed(number)
        if self.request.echo and self.request.logprobs is not None:
            told = [*(stream.prompt_logprobs or []), *told]
        body = {
            "index": number,
            "text": echoed + completion.text,
            "logprobs": None,
            "finish_reason": completion.finish,
            "stop_reason": completion.stopped_by,
        }
        if self.request.logprobs is not None:
            body["logprobs"] = self.texts.completion(told, first=self.texts.first_text(ids[0], echoed))
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.texts.prompt(stream.prompt_logprobs)
        return body

    def echoed(self, number: int) -> str:
        return self.prompts[number // (self.request.n or 1)] if self.request.echo else ""

    async def events(self, running: Running) -> AsyncIterator[bytes]:
        chunks = Chunks({**self.shared, "object": "text_completion"}, self.request, running)
        offsets: dict[int, int] = {}
        async for delta in running.deltas():
            begins = delta.choice not in offsets
            text = self.echoed(delta.choice) + delta.text if begins else delta.text
            offset = offsets.setdefault(delta.choice, 0)
            if delta.logprobs:
                offsets[delta.choice] += sum(len(self.texts.text_of(token)) for token in delta.ids)
            if delta.finish or delta.logprobs:
                yield chunks.choice(self.piece(delta, text, offset))
            elif text:  # nearly all events of a stream
                quoted = encode_basestring_ascii(text)
                yield chunks.written(f'{{"index":{delta.choice},"text":{quoted},"logprobs":null,"finish_reason":null}}')
        if self.request.wants_usage:
            yield chunks.usage()
        yield DONE

    def piece(self, delta: Delta, text: str, offset: int) -> dict[str, Any]:
        body = {"index": delta.choice, "text": text, "logprobs": None, "finish_reason": delta.finish}
        if delta.logprobs:
            body["logprobs"] = self.texts.completion(list(delta.logprobs), offset)
        if delta.finish:
            body["stop_reason"] = delta.stopped_by
        return body
