"""The items of an answer as it grows: thoughts, messages and calls in the order in which the model writes them.

Each step is told by events. An answer that is given whole is made by the same steps, and nobody listens to them.
"""

from collections.abc import Iterator
from typing import Any

from tilestack.engine.outputs import Delta, TokenLogprob
from tilestack.server.answer_reader import AnswerReader
from tilestack.server.reasoning import thought_tokens
from tilestack.server.responses.items import new_id, output_text, reasoning_text
from tilestack.server.token_text import TokenTexts
from tilestack.server.tools import Call, Found

Event = dict[str, Any]
PARTS = {"message": output_text, "reasoning": reasoning_text}  # what the text of an item is


class Output:
    """The output items of one answer; the last may still grow."""

    def __init__(self, reader: AnswerReader | None, texts: TokenTexts, thinking: bool | None):
        self.reader, self.texts, self.thinking = reader, texts, thinking
        self.items: list[dict[str, Any]] = []
        self.growing: str | None = None  # the type of the last item, while it does
        self.written: list[str] = []  # its text
        self.told: list[dict[str, Any]] = []  # the log-probabilities of its tokens
        self.untold: list[TokenLogprob] = []  # those of tokens that are not in a message yet
        self.ids: list[int] = []  # the tokens of thoughts, and what came with their last
        self.thoughts: int | None = None  # how many tokens they are, once that is known

    @property
    def reasoning_tokens(self) -> int:
        return self.thoughts if self.thoughts is not None else self.count_thoughts()

    def count_thoughts(self) -> int:
        return 0 if self.thinking is None else thought_tokens(map(self.texts.bytes_of, self.ids), self.thinking)

    def add(self, delta: Delta) -> Iterator[Event]:
        """What a piece of the answer adds."""
        self.untold += delta.logprobs
        if self.thoughts is None:
            self.ids += delta.ids
        if self.reader:
            found = self.reader.feed(delta.text, bool(delta.finish))
        else:
            found = Found([delta.text] if delta.text else [])
        if found.thoughts:
            yield from self.grow("reasoning", found.thoughts)
        if self.thoughts is None and found.parts:
            self.thoughts = self.count_thoughts()
            del self.untold[: self.thoughts]
        for part in found.parts:
            yield from self.call(part) if isinstance(part, Call) else self.grow("message", part)
        if self.untold and self.growing == "message":
            yield from self.grow("message", "")
        if delta.finish:
            if not self.items:
                yield from self.grow("message", "")
            yield from self.close("incomplete" if delta.finish == "length" else "completed")

    def grow(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to the last item, or to a new one where the last is of another type."""
        if self.growing != kind:
            yield from self.close()
            yield from self.open(kind)
        self.written.append(text)
        if kind == "reasoning":
            yield self.event("reasoning_text.delta", content_index=0, delta=text)
            return
        told, self.untold = [self.texts.chat(each) for each in self.untold], []
        self.told += told
        yield self.event("output_text.delta", content_index=0, delta=text, logprobs=told)

    def open(self, kind: str) -> Iterator[Event]:
        about: Event = {"role": "assistant"} if kind == "message" else {"summary": []}
        self.items.append({"id": new_id(kind), "type": kind, "status": "in_progress", **about, "content": []})
        self.growing, self.written, self.told = kind, [], []
        yield self.event("output_item.added", item=dict(self.items[-1]))
        yield self.event("content_part.added", content_index=0, part=PARTS[kind](""))

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the last item, if it grows."""
        if self.growing is None:
            return
        text = "".join(self.written)
        told = {"logprobs": self.told} if self.growing == "message" else {}
        part = PARTS[self.growing](text, **told)
        yield self.event(f"{part['type']}.done", content_index=0, text=text, **told)
        yield self.event("content_part.done", content_index=0, part=part)
        self.items[-1] |= {"status": status, "content": [part]}
        self.growing = None
        yield self.event("output_item.done", item=dict(self.items[-1]))

    def call(self, call: Call) -> Iterator[Event]:
        yield from self.close()
        item = {"id": new_id("function_call"), "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append(item | {"arguments": "", "status": "in_progress"})
        yield self.event("output_item.added", item=dict(self.items[-1]))
        yield self.event("function_call_arguments.delta", delta=call.arguments)
        yield self.event("function_call_arguments.done", name=call.name, arguments=call.arguments)
        self.items[-1] |= {"arguments": call.arguments, "status": "completed"}
        yield self.event("output_item.done", item=dict(self.items[-1]))

    def event(self, type: str, **fields: Any) -> Event:
        """An event of the last item; those about an item as a whole name it in themselves."""
        about = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        return {"type": f"response.{type}", "output_index": len(self.items) - 1, **about, **fields}
