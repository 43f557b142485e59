"""Steps that read: chunks of prompts, guesses and single tokens side by side, from one small tensor that holds in turn

    ids, their rows                 [T]        -1 for a token that only the device knows, the last of its row
    rows, lengths                   [S]        of the sequences
    cu_queries                      [S + 1]    where their new tokens begin
    places, their rows, seeds       [P]        the tokens that are followed by a new one

The host takes up to a millisecond for a layer's kernels, which is longer than the device computes them for thousands of
tokens; so it is here that a prompt's first token is won, and that many prompts are read as fast as the device can. Only steps
of more tokens than an engine takes by itself are launched kernel by kernel.

Shapes: T tokens, S sequences, P places, those that fill up included; P is S. In steps of few tokens they are as many as
these, so that a guess at any place fits; in others few, or as many as there are rows.
"""

from collections.abc import Sequence as List
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from tilestack.engine.captured import CapturedSteps, Size
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch

if TYPE_CHECKING:
    from tilestack.engine.runner import Runner

FEW, MOST = 64, 8192  # tokens of a step
FEW_SEQUENCES = 8


def filled_up(tokens: int) -> int:
    """Tokens that a step is filled up to: powers of two while they are few, and then to an eighth or less of more."""
    power = 1 << max(tokens - 1, 0).bit_length()
    unit = power if tokens <= FEW else max(FEW, power // 8)
    return -(-tokens // unit) * unit


class ReadingSteps(CapturedSteps):
    def __init__(self, runner: "Runner", rows: int, step_tokens: int):
        super().__init__(runner, rows)
        self.most = min(step_tokens, MOST)

    def take(self, parts: List[Part]) -> bool:
        tokens = sum(part.count + len(part.drafts) for part in parts)
        if not 0 < tokens <= self.most or any(part.tells_prompt for part in parts):
            return False
        return tokens <= FEW or not any(part.drafts for part in parts)

    def size_of(self, parts: List[Part]) -> Size:
        tokens = filled_up(sum(part.count + len(part.drafts) for part in parts))
        few = min(FEW_SEQUENCES, self.rows)
        most = tokens if tokens <= FEW else few if len(parts) <= few else self.rows
        return Size(tokens, most, any(part.sequence.adapter for part in parts))

    def sizes(self) -> list[Size]:
        few = min(FEW_SEQUENCES, self.rows)
        tokens = sorted({filled_up(count) for count in range(1, self.most + 1)})
        small = [(count, count) for count in tokens if count <= FEW]
        large = [(count, most) for count in tokens if count > FEW for most in sorted({few, self.rows})]
        return [Size(*size, adapted) for adapted in self.with_and_without_adapters() for size in small + large]

    def inputs(self, parts: List[Part], size: Size) -> list[int]:
        ids: list[int] = []
        token_rows: list[int] = []
        places: list[int] = []
        place_rows: list[int] = []
        seeds: list[int] = []
        counts = []
        for part in parts:
            sequence, end = part.sequence, part.start + part.count
            new = [*sequence.ids[part.start : end], *([-1] if end > len(sequence.ids) else []), *part.drafts]
            ids += new
            token_rows += [sequence.row] * len(new)
            counts.append(len(new))
            if part.draws:
                drawn = len(part.drafts) + 1
                places += range(len(ids) - drawn, len(ids))
                place_rows += [sequence.row] * drawn
                seeds += range(sequence.seed + part.index, sequence.seed + part.index + drawn)
        no_token = size.tokens - len(ids)
        idle, no_place = size.sequences - len(parts), size.sequences - len(places)
        return [
            *ids, *[0] * no_token, *token_rows, *[self.padding] * no_token,
            *(part.sequence.row for part in parts), *[self.padding] * idle,
            *(part.start + count for part, count in zip(parts, counts, strict=True)), *[0] * idle,
            *accumulate(counts, initial=0), *[len(ids)] * idle,
            *places, *[0] * no_place, *place_rows, *[self.padding] * no_place, *seeds, *[0] * no_place,
        ]  # fmt: skip

    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        tokens, most, _ = size
        ids, token_rows, rows, lengths, cu_queries, places, place_rows, seeds = inputs.split(
            [tokens, tokens, most, most, most + 1, most, most, most]
        )
        runner, decoder = self.runner, self.runner.decoder
        batch = PagedBatch(runner.cache, runner.tables[rows], lengths, cu_queries, tokens, most_queries=tokens)
        with self.adapters_of(token_rows, size):
            hidden = decoder.hidden(self.known_or_last(ids, token_rows), context=batch)[places]
        return self.draw(decoder.logits(hidden), place_rows, seeds), hidden
