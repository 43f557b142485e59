"""What a model thinks before it answers, as DeepSeek and Qwen write it: <think>…</think> and then the answer.

Some templates write the first mark themselves, so that the model's text begins within its thoughts. Only what an answer
begins with is taken for thoughts; a mark further on is text.
"""

from collections.abc import Iterable, Sequence

from tilestack.data import Tokenizer
from tilestack.server.tools import undecided

OPEN, CLOSE = "<think>", "</think>"
LAST = 16  # tokens at the end of a prompt, among which the mark is


def opens_thoughts(tokenizer: Tokenizer, prompt: Sequence[int], continued: str = "") -> bool:
    """Whether an answer begins within thoughts: the prompt ends with their mark, or what is `continued` has not closed them."""
    if continued.lstrip().startswith(OPEN):
        return CLOSE not in continued
    return tokenizer.decode(prompt[-LAST:], special=True).rstrip().endswith(OPEN)


class ThoughtReader:
    """Splits one answer, piece by piece, into thoughts and what follows them, each without the space around it."""

    def __init__(self, begun: bool):
        self.held, self.thought = "", False
        self.place = "thoughts" if begun else "before"  # then "after" them, and then "answer"

    def feed(self, piece: str) -> tuple[str, str]:
        """What is certain after this piece: thoughts, and text of the answer."""
        self.held += piece
        thoughts = ""
        if self.place == "before":
            found = self.held.lstrip()
            if found.startswith(OPEN):
                self.held, self.place = found.removeprefix(OPEN), "thoughts"
            elif not OPEN.startswith(found):
                self.place = "answer"
        if self.place == "thoughts":
            thoughts = self.take_thoughts()
        if self.place == "after":
            self.held = self.held.lstrip()
            self.place = "answer" if self.held else "after"
        return thoughts, self.take_all() if self.place == "answer" else ""

    def take_thoughts(self) -> str:
        before, closed, after = (self.held if self.thought else self.held.lstrip()).partition(CLOSE)
        certain = len(before.rstrip()) if closed else len(before) - undecided(before, CLOSE)
        self.held = after if closed else before[certain:]
        self.place = "after" if closed else "thoughts"
        self.thought = self.thought or certain > 0
        return before[:certain]

    def end(self) -> tuple[str, str]:
        """What is left when the answer has ended, which may be within thoughts."""
        place, left = self.place, self.take_all()
        return (left.rstrip(), "") if place == "thoughts" else ("", left)

    def take_all(self) -> str:
        held, self.held = self.held, ""
        return held


def thought_tokens(answer: Iterable[bytes], begun: bool) -> int:
    """How many tokens of an answer, given by their bytes, are thoughts or a mark of them."""
    said, count = bytearray(), 0
    for count, token in enumerate(answer, 1):
        said += token
        if not begun:
            start = said.lstrip()
            begun = start.startswith(OPEN.encode())
            if not begun and not OPEN.encode().startswith(start):
                return 0
        if begun and CLOSE.encode() in said[-len(token) - len(CLOSE) :]:
            return count
    return count if begun else 0
