"""Calls of functions in what a model writes, as Hermes and Qwen do: <tool_call>{"name": …, "arguments": …}</tool_call>.

Text is given on as it comes; what may be the beginning of a call is held back until more is known. A call that is not
JSON stays text, so that nothing that the model wrote is lost.
"""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Found:
    """What a piece of an answer has come to: thoughts, and after them pieces of text and calls, in their order."""

    parts: list[str | Call] = field(default_factory=list)
    thoughts: str = ""

    def say(self, text: str) -> None:
        if text:
            self.parts.append(text)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


class CallReader:
    """Splits one answer, piece by piece, into text and calls; at most `most` calls are given. The text is what stands around
    the calls, without the space at its ends where a call is next to it."""

    def __init__(self, most: int | None = None):
        self.held, self.inside, self.seen, self.most = "", False, 0, most
        self.said, self.space = False, ""  # whether there was text, and the space behind it, given if more text follows

    def feed(self, piece: str) -> Found:
        """What is certain after this piece."""
        self.held += piece
        found = Found()
        while self.inside or OPEN in self.held:
            if not self.inside:
                before, self.held = self.held.split(OPEN, 1)
                found.say(self._say(before))
                self.inside = True
            if CLOSE not in self.held:
                return found
            written, self.held = self.held.split(CLOSE, 1)
            self.inside = False
            self._take(written, CLOSE, found)
        free = len(self.held) - undecided(self.held)
        found.say(self._say(self.held[:free]))
        self.held = self.held[free:]
        return found

    def end(self) -> Found:
        """What is left when the answer has ended, which may be within a call."""
        found = Found()
        left, self.held = self.held, ""
        if self.inside:
            self._take(left, "", found)
        else:
            found.say(self._say(left))
        if self.seen == 0:
            found.say(self.space)
        return found

    def _say(self, text: str) -> str:
        text = self.space + text
        if self.seen and not self.said:
            text = text.lstrip()
        kept = text.rstrip()
        self.said, self.space = self.said or bool(kept), text[len(kept) :]
        return kept

    def _take(self, written: str, close: str, found: Found) -> None:
        call = parse_call(written)
        if call is None:
            found.say(self._say(OPEN + written + close))
        elif self.most is None or self.seen < self.most:
            self.seen += 1
            found.parts.append(call)


class WholeCall:
    """An answer that is a call and nothing else, since it was made to be one."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, piece: str) -> Found:
        self.held += piece
        return Found()

    def end(self) -> Found:
        call = parse_call(self.held)
        return Found([call or self.held])


def undecided(text: str, mark: str = OPEN) -> int:
    """How many characters at the end may yet belong to a mark: the beginning of it, and the space before."""
    begun = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    certain = text[: len(text) - begun]
    return begun + len(certain) - len(certain.rstrip())


def parse_call(written: str) -> Call | None:
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments", read.get("parameters", {}))
    return Call(read["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
