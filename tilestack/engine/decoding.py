"""Steps that only decode: one token for each sequence, from one small tensor, inputs [7, G]

    rows, lengths     of the sequences, with the new token
    seeds             of their noise
    known, sources    the tokens to go on from, or the rows in which those were drawn that only the device knows
    positions, slots  where the tokens stand in their texts, and where they are kept

The host knows all this, and to tell it costs nothing, while a kernel that finds it takes as long as one that multiplies.

Shapes: G sequences, those that fill up included; V vocabulary.
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilestack.engine.captured import CapturedSteps, Size
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch

if TYPE_CHECKING:
    from tilestack.engine.runner import Runner


@functools.cache
def sizes_up_to(most: int) -> list[int]:
    """Sizes of graphs: dense where a row more matters, and the most there can be."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class DecodingSteps(CapturedSteps):
    def __init__(self, runner: "Runner", rows: int):
        super().__init__(runner, rows)
        self.numbers = torch.arange(rows + 1, device=runner.device)

    def take(self, parts: List[Part]) -> bool:
        return bool(parts) and all(part.count == 1 and part.draws and not part.drafts for part in parts)

    def arranged(self, parts: list[Part]) -> list[Part]:
        """Long texts first: attention begins with what takes longest, and the GPU is busy to the end."""
        return sorted(parts, key=lambda part: -part.start)

    def size_of(self, parts: List[Part]) -> Size:
        sizes = sizes_up_to(self.rows)
        size = sizes[bisect_left(sizes, len(parts))]
        return Size(size, size, any(part.sequence.adapter for part in parts))

    def sizes(self) -> list[Size]:
        return [
            Size(size, size, adapted) for adapted in self.with_and_without_adapters() for size in sizes_up_to(self.rows)
        ]

    def inputs(self, parts: List[Part], size: Size) -> list[int]:
        sequences, more = [part.sequence for part in parts], size.sequences - len(parts)
        page, nobody = self.runner.cache.page, self.runner.nobody
        rows, starts = [sequence.row for sequence in sequences], [part.start for part in parts]
        unread = [sequence.in_flight > 1 for sequence in sequences]
        pages = [sequence.pages[start // page] for sequence, start in zip(sequences, starts, strict=True)]
        return [
            *rows, *[self.padding] * more,
            *(start + 1 for start in starts), *[1] * more,
            *(part.sequence.seed + part.index for part in parts), *[0] * more,
            *(0 if waits else sequence.ids[-1] for waits, sequence in zip(unread, sequences, strict=True)), *[0] * more,
            *(row if waits else nobody for waits, row in zip(unread, rows, strict=True)), *[nobody] * more,
            *starts, *[0] * more,
            *(number * page + start % page for number, start in zip(pages, starts, strict=True)), *[-1] * more,
        ]  # fmt: skip

    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        runner = self.runner
        rows, lengths, seeds, known, sources, positions, slots = inputs.view(7, size.sequences)
        each = self.numbers[: size.sequences + 1]
        batch = PagedBatch(
            runner.cache, runner.tables[rows], lengths, each, size.sequences, 1, (each[:-1], positions, slots)
        )
        with self.adapters_of(rows, size):
            hidden = runner.decoder.hidden(self.going_on(known, sources), context=batch)
        return self.draw(runner.decoder.logits(hidden), rows, seeds), hidden
