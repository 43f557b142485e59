"""Tokens as text while they come, up to a stop: what may be the beginning of one is held back until more is known."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer. `add` gives what can be shown; `stopped_by` is the stop text that was found."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), keep_stop: bool = False):
        self.tokenizer, self.stops, self.keep_stop = tokenizer, tuple(stops), keep_stop
        self.stream: Any = DecodeStream(skip_special_tokens=True)
        self.held = ""
        self.stopped_by: str | None = None

    def add(self, token: int, stops_count: bool = True) -> str:
        """The text that is certain after one more token; where `stops_count`, up to the first stop."""
        if self.tokenizer is None:
            return ""
        self.held += self.stream.step(self.tokenizer, token) or ""
        if not stops_count:
            return self.shown(len(self.held))
        found = [(self.held.find(stop), stop) for stop in self.stops if stop in self.held]
        if found:
            place, self.stopped_by = min(found)
            text = self.held[: place + (len(self.stopped_by) if self.keep_stop else 0)]
            self.held = ""
            return text
        begun = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        return self.shown(len(self.held) - max(begun, default=0))

    def rest(self) -> str:
        """What was held back, at the end of the answer."""
        return self.shown(len(self.held))

    def shown(self, length: int) -> str:
        text, self.held = self.held[:length], self.held[length:]
        return text
