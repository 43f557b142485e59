"""Steps that only decode: one token for each sequence, from one small tensor,

    inputs [4, G]     the rows, how long their sequences are with the new token, the seeds of their noise, and the
                      tokens to go on from, -1 for those that only the device knows

Shapes: G sequences, those that fill up included; V vocabulary.
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence as List

from torch import Tensor

from tilestack.engine.captured import CapturedSteps, Size
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch


@functools.cache
def sizes_up_to(most: int) -> list[int]:
    """Sizes of graphs: dense where a row more matters, and the most there can be."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class DecodingSteps(CapturedSteps):
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
        return [
            *(sequence.row for sequence in sequences), *[self.padding] * more,
            *(part.start + 1 for part in parts), *[1] * more,
            *(part.sequence.seed + part.index for part in parts), *[0] * more,
            *(-1 if sequence.in_flight > 1 else sequence.ids[-1] for sequence in sequences), *[0] * more,
        ]  # fmt: skip

    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        rows, lengths, seeds, known = inputs.view(4, size.sequences)
        with self.adapters_of(rows, size):
            hidden = self.hidden(self.known_or_last(known, rows), lengths, self.runner.tables[rows])
        return self.draw(self.runner.decoder.logits(hidden), rows, seeds), hidden

    def hidden(self, ids: Tensor, lengths: Tensor, pages: Tensor) -> Tensor:
        """Hidden states [G, hidden] of a token of each sequence, the last of so many, which lie in its pages."""
        return self.runner.decoder.hidden(ids, context=PagedBatch.decoding(self.runner.cache, pages, lengths))
