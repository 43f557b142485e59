"""Steps that only decode: one token for each sequence, from one small tensor,

    inputs [4, G]     the rows, how long their sequences are with the new token, the seeds of their noise, and the
                      tokens to go on from, -1 for those that only the device knows

A batch of one may go through the decoder as a single kernel (persistent.py), where that is asked for.

Shapes: G sequences, those that fill up included.
"""

import logging
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from torch import Tensor

from tilestack.engine.captured import CapturedSteps, Size, is_plain
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch

if TYPE_CHECKING:
    from tilestack.engine.persistent import PersistentStep
    from tilestack.engine.runner import Runner

log = logging.getLogger(__name__)


def sizes_up_to(most: int) -> list[int]:
    """Sizes of graphs: dense where a row more matters, and the most there can be."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def persistent_step(runner: "Runner") -> "PersistentStep | None":
    """The step as a single kernel; where there is none, the reason is logged and decoding goes on as usual."""
    from tilestack.engine.persistent import PersistentStep  # brings all kernels along
    from tilestack.kernels.cuda.build import BuildError

    try:
        return PersistentStep(runner)
    except (ValueError, BuildError) as reason:
        log.warning("decoding is not persistent: %s", reason)
        return None


class DecodingSteps(CapturedSteps):
    def __init__(self, runner: "Runner", rows: int, persistent: bool = False):
        super().__init__(runner, rows)
        self.persistent = persistent_step(runner) if persistent else None

    def take(self, parts: List[Part]) -> bool:
        one = lambda part: part.count == 1 and part.draws and not part.drafts
        return bool(parts) and all(one(part) and is_plain(part) for part in parts)

    def arranged(self, parts: list[Part]) -> list[Part]:
        """Long texts first: attention begins with what takes longest, and the GPU is busy to the end."""
        return sorted(parts, key=lambda part: -part.start)

    def size_of(self, parts: List[Part]) -> Size:
        size = next(size for size in sizes_up_to(self.rows) if size >= len(parts))
        return Size(size, size)

    def sizes(self) -> list[Size]:
        return [Size(size, size) for size in sizes_up_to(self.rows)]

    def inputs(self, parts: List[Part], size: Size) -> list[int]:
        sequences, more = [part.sequence for part in parts], size.sequences - len(parts)
        return [
            *(sequence.row for sequence in sequences), *[self.padding] * more,
            *(part.start + 1 for part in parts), *[1] * more,
            *(part.sequence.seed + part.index for part in parts), *[0] * more,
            *(-1 if sequence.in_flight > 1 else sequence.ids[-1] for sequence in sequences), *[0] * more,
        ]  # fmt: skip

    def compute(self, inputs: Tensor, size: Size) -> Tensor:
        rows, lengths, seeds, known = inputs.view(4, size.sequences)
        ids = self.known_or_last(known, rows)
        if self.persistent is not None and size.tokens == 1:
            return self.draw(self.persistent.logits(ids, lengths, self.runner.tables[rows]), rows, seeds)
        batch = PagedBatch.decoding(self.runner.cache, self.runner.tables[rows], lengths)
        decoder = self.runner.decoder
        return self.draw(decoder.logits(decoder.hidden(ids, context=batch)), rows, seeds)
