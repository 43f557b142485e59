"""Tokens as text while they come, up to a stop: what may be the beginning of one is held back until more is known."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CUT = "\ufffd"  # stands for bytes that are no character, or not yet
PATIENCE = 16  # tokens without text after which they are no character; one has four bytes at most


class Pieces:
    """The text that each token adds. Of a character that comes in several tokens, the last has it all."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        """`before` are the last tokens of what the text follows: some tokenizers write a space between it and the first."""
        self.tokenizer = tokenizer
        self.begin_after(before)

    def begin_after(self, before: Sequence[int]) -> None:
        self.before = list(before) if not self.decode(before).endswith(CUT) else []
        self.undecided: list[int] = []
        self.stream: Any = DecodeStream(ids=self.before, skip_special_tokens=True)

    def step(self, token: int) -> str:
        self.undecided.append(token)
        try:
            piece = self.stream.step(self.tokenizer, token)
        except Exception:  # of no class of its own: after this token, those before it decode to something else
            return self.give_up()
        if piece:
            self.before, self.undecided = self.undecided, []
            return piece
        return self.give_up() if len(self.undecided) > PATIENCE else ""

    def give_up(self) -> str:
        """Show tokens as they are that make no text, and begin anew after them."""
        text = self.left()
        self.begin_after(self.undecided)
        return text

    def left(self) -> str:
        """The text of the tokens that are undecided, with marks in place of what is no character."""
        first, whole = self.decode(self.before), self.decode([*self.before, *self.undecided])
        return whole.removeprefix(first) if whole.startswith(first) else self.decode(self.undecided)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


class StopText:
    """A text to be found in one that comes in pieces, each character read once (Knuth, Morris and Pratt): `begun` says how
    much of it the text so far ends with."""

    def __init__(self, text: str):
        self.text, self.begun = text, 0
        self.shorter = [0]  # for every beginning of it, the longest shorter one with which that ends
        length = 0
        for character in text[1:]:
            length = self.longer(length, character)
            self.shorter.append(length)

    def longer(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self.shorter[length - 1]
        return length + (self.text[length] == character)

    def find(self, piece: str) -> int:
        """Where in the next piece it is complete, the number of characters up to its end; 0: not yet."""
        for place, character in enumerate(piece, 1):
            self.begun = self.longer(self.begun, character)
            if self.begun == len(self.text):
                return place
        return 0


class TextStream:
    """The text of one answer. `add` gives what can be shown; `stopped_by` is the stop text that was found."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        before: Sequence[int] = (),
    ):
        self.pieces = None if tokenizer is None else Pieces(tokenizer, before)
        self.stops, self.keep_stop = [StopText(stop) for stop in stops], keep_stop
        self.held = ""
        self.stopped_by: str | None = None

    def add(self, token: int, stops_count: bool = True) -> str:
        """The text that is certain after one more token; where `stops_count`, up to the first stop."""
        if self.pieces is None:
            return ""
        piece = self.pieces.step(token)
        if not stops_count:
            self.held += piece
            return self.shown(len(self.held))
        return self.up_to_stop(piece)

    def up_to_stop(self, piece: str) -> str:
        """What one more piece of text makes certain."""
        before = len(self.held)
        self.held += piece
        ends = [(before + end, stop.text) for stop in self.stops if (end := stop.find(piece))]
        if ends:
            # The one that was there first, character by character, however the text is cut into pieces.
            end, self.stopped_by = min(ends, key=lambda found: (found[0], -len(found[1])))
            text = self.held[: end if self.keep_stop else end - len(self.stopped_by)]
            self.held = ""
            return text
        return self.shown(len(self.held) - max((stop.begun for stop in self.stops), default=0))

    def rest(self) -> str:
        """What was held back, at the end of the answer, up to a stop in it; a character that was cut off is left out."""
        cut = "" if self.pieces is None or self.stopped_by is not None else self.pieces.left().rstrip(CUT)
        return self.up_to_stop(cut) + self.shown(len(self.held))

    def shown(self, length: int) -> str:
        text, self.held = self.held[:length], self.held[length:]
        return text
