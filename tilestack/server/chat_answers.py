"""The answer to a chat, whole or in events: text, calls of functions, log-probabilities, and why it ended."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from tilestack.engine.outputs import Completion, Delta, TokenLogprob
from tilestack.server.answer_reader import AnswerReader, answer_reader
from tilestack.server.events import DONE, Answers, Chunks
from tilestack.server.running import Running, usage_body
from tilestack.server.schemas import ChatRequest
from tilestack.server.token_text import TokenTexts
from tilestack.server.tools import Call, Found


@dataclass(frozen=True)
class ChatAnswers(Answers):
    """Shapes what the engine gives for one chat; `shared` is its id, time and model."""

    request: ChatRequest
    texts: TokenTexts
    shared: dict[str, Any]
    thinking: bool | None = None  # whether an answer begins within thoughts; None: thoughts are not told from text

    def reader(self) -> AnswerReader | None:
        return answer_reader(self.request, self.thinking)

    def whole(self, completions: Sequence[Completion], running: Running) -> dict[str, Any]:
        body = {
            **self.shared,
            "object": "chat.completion",
            "choices": [self.choice(number, completion) for number, completion in enumerate(completions)],
            "usage": usage_body(running.usage),
        }
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.texts.prompt(running.streams[0].prompt_logprobs)
        return body

    def choice(self, number: int, completion: Completion) -> dict[str, Any]:
        reader = self.reader()
        found = reader.feed(completion.text, last=True) if reader else Found([completion.text])
        text, calls = found.text, found.calls
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if self.thinking is not None:
            message["reasoning_content"] = found.thoughts or None
        if calls:
            message["tool_calls"] = [call.body() for call in calls]
        return {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(completion.logprobs),
            "finish_reason": "tool_calls" if calls and completion.finish == "stop" else completion.finish,
            "stop_reason": completion.stopped_by,
        }

    def logprobs(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": [self.texts.chat(each) for each in told], "refusal": None} if self.request.logprobs else None

    async def events(self, running: Running) -> AsyncIterator[bytes]:
        chunks = Chunks({**self.shared, "object": "chat.completion.chunk"}, self.request, running)
        choices: dict[int, ChatChoice] = {}
        async for delta in running.deltas():
            if (choice := choices.get(delta.choice)) is None:
                choice = choices[delta.choice] = ChatChoice(delta.choice, self.reader())
                yield chunks.choice(choice.body({"role": "assistant", "content": ""}))
            if delta.text and not (delta.finish or delta.logprobs or choice.reader):  # nearly all events of a stream
                said = f'{{"content":{encode_basestring_ascii(delta.text)}}}'
                yield chunks.written(f'{{"index":{delta.choice},"delta":{said},"logprobs":null,"finish_reason":null}}')
                continue
            told = self.logprobs(delta.logprobs) if delta.logprobs else None
            for body in choice.bodies(delta, told):
                yield chunks.choice(body)
        if self.request.wants_usage:
            yield chunks.usage()
        yield DONE


class ChatChoice:
    """One answer in events."""

    def __init__(self, number: int, reader: AnswerReader | None):
        self.number, self.reader, self.calls = number, reader, 0

    def bodies(self, delta: Delta, told: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What a piece of the answer adds."""
        found = self.reader.feed(delta.text, bool(delta.finish)) if self.reader else Found([delta.text])
        made = [self.body({"reasoning_content": found.thoughts})] if found.thoughts else []
        made += [self.body({"content": found.text}, told)] if found.text or told else []
        made += [self.body({"tool_calls": [self.called(call)]}) for call in found.calls]
        if delta.finish:
            finish = "tool_calls" if self.calls and delta.finish == "stop" else delta.finish
            made.append(self.body({}) | {"finish_reason": finish, "stop_reason": delta.stopped_by})
        return made

    def body(self, delta: dict[str, Any], told: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.number, "delta": delta, "logprobs": told, "finish_reason": None}

    def called(self, call: Call) -> dict[str, Any]:
        self.calls += 1
        return {"index": self.calls - 1, **call.body()}
