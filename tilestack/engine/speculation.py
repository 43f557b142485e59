"""Speculation: tokens are guessed, and the model reads all guesses in one step instead of one after the other.

At each guess the model draws the token it would have drawn there anyway, with the noise that belongs to that place (see
sampling.py). As long as it draws what was guessed, the next place was read with the right tokens before it and its token
stands too; the first that differs is the right token after all and the rest is void. So the text is, token for token, the
text without speculation, at any temperature: exact in distribution because it is the same draw. A guess x is accepted
with the probability p(x) that the model gives it, as by rejection sampling of a guess that is certain.
"""

from array import array
from collections.abc import Sequence as List
from itertools import cycle, islice
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from tilestack.engine.runner import Runner
from tilestack.engine.sampling import Draws
from tilestack.engine.scheduler import Part
from tilestack.engine.sequence import Sequence
from tilestack.models import Decoder, PagedBatch

WIDTH = array("i").itemsize  # bytes of a token in a text to be searched


class Drafter(Protocol):
    usual: int  # tokens at a time, where nobody says
    most: int  # that they may grow to while all are right
    step_tokens: int | None  # of a step with guesses, all sequences together, if there is such a bound

    def fill(self, parts: List[Part]) -> None:
        """Give parts that have room for them some drafts."""
        ...


def check_draft(draft: Decoder, decoder: Decoder, context: int) -> None:
    """Refuse a model that cannot draft for another whose texts have up to `context` tokens."""
    ours, theirs = draft.config, decoder.config
    if ours.vocabulary != theirs.vocabulary:
        raise ValueError(
            f"the draft model has {ours.vocabulary} tokens and the model {theirs.vocabulary}: they must share a tokenizer"
        )
    if ours.positions < context:
        raise ValueError(
            f"the draft model reads {ours.positions} tokens and a text may have {context}; give a context of at most "
            f"{ours.positions}"
        )


class LookUp:
    """Guesses by looking up what followed the last few tokens where they stood before: prompts are often quoted.

    Texts are kept as bytes, four for a token, since those can be searched much faster than lists."""

    usual = 7  # which are read with the last token of the text, and steps of 8 cost as much as those of 5

    def __init__(self, longest: int = 4, window: int = 8192, most: int = usual, step_tokens: int | None = None):
        self.longest, self.window, self.most, self.step_tokens = longest, window, most, step_tokens
        self.texts: WeakKeyDictionary[Sequence, bytearray] = WeakKeyDictionary()

    def fill(self, parts: List[Part]) -> None:
        guessing = [part for part in parts if part.room]
        bound = sum(part.room for part in guessing)
        if self.step_tokens is not None:
            bound = min(bound, self.step_tokens - sum(part.count for part in parts))
        for number, part in enumerate(guessing):
            share = min(part.room, bound // (len(guessing) - number))  # what one leaves is for those behind it
            if share > 0:
                text = self.texts.setdefault(part.sequence, bytearray())
                text += array("i", part.sequence.ids[len(text) // WIDTH :]).tobytes()
                part.drafts = self.guess(text, share)
                bound -= len(part.drafts)

    def guess(self, text: bytearray, count: int) -> list[int]:
        """What followed the last time that the longest ending of the text occurred. Where that is the end of the text, what
        followed begins again: a text that repeats itself is guessed to go on doing so."""
        first = max(0, len(text) - self.window * WIDTH)
        for size in range(min(self.longest, (len(text) - first) // WIDTH - 1), 0, -1):
            ending = bytes(text[-size * WIDTH :])
            end = len(text) - WIDTH  # before which an earlier occurrence ends
            while (place := text.rfind(ending, first, end)) >= 0:
                if place % WIDTH == 0:
                    follows = place + size * WIDTH
                    followed = array("i", bytes(text[follows : follows + count * WIDTH])).tolist()
                    return list(islice(cycle(followed), count))
                end = place + len(ending) - 1  # it began within a token
        return []


class DraftModel:
    """Guesses of a smaller model with the same tokenizer. Its pages have the numbers of the large model's: it reads along
    with every step, and draws its guesses with the noise that the large model will draw with at those places."""

    usual = most = 4
    step_tokens: int | None = None

    def __init__(self, runner: Runner):
        self.runner = runner

    @torch.no_grad()
    def fill(self, parts: List[Part]) -> None:
        # Those with the most room first, so that whoever has no more of it drops off the end.
        guessing = sorted((part for part in parts if part.room), key=lambda part: -part.room)
        if not guessing or self.runner.draft is None:
            return
        decoder, cache = self.runner.draft
        self.runner.sync_rows([part.sequence for part in guessing])
        indices = self.runner.indices
        rows = indices([part.sequence.row for part in guessing])
        tables = self.runner.tables[rows]
        ids = indices([part.sequence.ids[-1] for part in guessing])
        lengths = indices([part.start + part.count for part in guessing])
        guesses = []
        for place in range(guessing[0].room):
            going = [part for part in guessing if part.room > place]
            count = len(going)
            batch = PagedBatch.decoding(cache, tables[:count], lengths[:count] + place)
            logits = decoder.logits(decoder.hidden(ids[:count], context=batch))
            draws = Draws([part.sequence for part in going], [part.index + place for part in going])
            ids = self.runner.sampling.draw(logits, draws, rows[:count]).clamp(min=0).long()
            guesses.append(ids)
        for drafts in (guess.tolist() for guess in guesses):
            for part, token in zip(guessing, drafts, strict=False):
                part.drafts.append(token)
