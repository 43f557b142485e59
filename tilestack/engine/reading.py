"""Steps that read: chunks of prompts, guesses and single tokens side by side, from one small tensor that holds in turn

    ids, sources                    [T]        the tokens, or the rows in which those were drawn that only the device knows
    sequences, positions, slots     [T]        whose tokens they are, where in its text, and where they are kept
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
from typing import TYPE_CHECKING

import numpy
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


def filled(values: List[int] | numpy.ndarray, size: int, value: int) -> numpy.ndarray:
    """Integers, and one of them as often as it takes until they are so many."""
    found = numpy.full(size, value, dtype=numpy.int64)
    found[: len(values)] = values
    return found


class ReadingSteps(CapturedSteps):
    def __init__(self, runner: "Runner", rows: int, step_tokens: int):
        super().__init__(runner, rows)
        self.most = min(step_tokens, MOST)

    def take(self, parts: List[Part]) -> bool:
        tokens = sum(part.count + len(part.drafts) for part in parts)
        # A graph leaves the states of tokens that are followed by a new one, and these need others.
        if not 0 < tokens <= self.most or any(part.tells_prompt or part.pools for part in parts):
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

    def inputs(self, parts: List[Part], size: Size) -> numpy.ndarray:
        nobody, page = self.runner.nobody, self.runner.cache.page
        ids: list[int] = []
        unread: list[tuple[int, int]] = []  # places of tokens that only the device knows, and their rows
        pages: list[int] = []  # of all parts, those that their new tokens lie in
        first_pages: list[int] = []  # of each part, the place that its text's first page would have there
        places: list[int] = []
        place_rows: list[int] = []
        seeds: list[int] = []
        for part in parts:
            sequence, start, end = part.sequence, part.start, part.start + part.count
            first_pages.append(len(pages) - start // page)
            pages += sequence.pages[start // page : (end + len(part.drafts) - 1) // page + 1]
            ids += sequence.ids[start:end]
            if end > len(sequence.ids):
                unread.append((len(ids), sequence.row))
                ids.append(0)
            ids += part.drafts
            if part.draws:
                drawn = len(part.drafts) + 1
                places += range(len(ids) - drawn, len(ids))
                place_rows += [sequence.row] * drawn
                seeds += range(sequence.seed + part.index, sequence.seed + part.index + drawn)
        whole = lambda values: numpy.array(values, dtype=numpy.int64)
        starts, counts = whole([part.start for part in parts]), whole([part.count + len(part.drafts) for part in parts])
        cu_queries = numpy.concatenate([whole([0]), counts.cumsum()])
        of_token = lambda values: numpy.repeat(values, counts)  # what is a part's, for each of its tokens
        positions = numpy.arange(len(ids)) + of_token(starts - cu_queries[:-1])
        slots = whole(pages)[of_token(whole(first_pages)) + positions // page] * page + positions % page
        sources = numpy.full(len(ids), nobody)
        sources[whole([place for place, _ in unread])] = whole([row for _, row in unread])
        tokens, most = size.tokens, size.sequences
        return numpy.concatenate([
            filled(ids, tokens, 0), filled(sources, tokens, nobody),
            filled(of_token(numpy.arange(len(parts))), tokens, most - 1), filled(positions, tokens, 0), filled(slots, tokens, -1),
            filled([part.sequence.row for part in parts], most, self.padding), filled(starts + counts, most, 0),
            filled(cu_queries, most + 1, len(ids)),
            filled(places, most, 0), filled(place_rows, most, self.padding), filled(seeds, most, 0),
        ])  # fmt: skip

    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        tokens, most, adapted = size
        ids, sources, sequences, positions, slots, rows, lengths, cu_queries, places, place_rows, seeds = inputs.split(
            [tokens] * 5 + [most, most, most + 1, most, most, most]
        )
        runner, decoder = self.runner, self.runner.decoder
        batch = PagedBatch(
            runner.cache, runner.tables[rows], lengths, cu_queries, tokens, tokens, (sequences, positions, slots)
        )
        with self.adapters_of(rows[sequences] if adapted else rows, size):
            hidden = decoder.hidden(self.going_on(ids, sources), context=batch)[places]
        return self.draw(decoder.logits(hidden), place_rows, seeds), hidden
