"""Steps that decode one sequence, as a single kernel (persistent.py).

An engine takes them by itself where the model and the GPU allow it, for texts of lengths at which they are faster than a
graph of operators; with `decode="persistent"` at any length. When another sequence joins, or something is asked for that the
runner's tables do not hold, the next step is of another kind: the pages are the same, so nothing has to be moved. The last
bits of logits differ between kinds of steps, as they do between sizes of a batch; a batch-invariant engine has no graphs and
so none of these.
"""

import logging
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from torch import Tensor

from tilestack.engine.captured import Size, is_plain
from tilestack.engine.decoding import DecodingSteps
from tilestack.engine.scheduler import Part

if TYPE_CHECKING:
    from tilestack.engine.persistent import PersistentStep
    from tilestack.engine.runner import Runner

log = logging.getLogger(__name__)

# Tokens of a text, unless told: as far as it was timed. A cluster of the kernel reads all keys of its heads, while paged
# attention spreads a long text over the whole GPU.
LONGEST = 2048
ONE = Size(1, 1)


class PersistentSteps(DecodingSteps):
    def __init__(self, runner: "Runner", rows: int, step: "PersistentStep", longest: int | None):
        super().__init__(runner, rows)
        self.step, self.longest = step, longest

    def take(self, parts: List[Part]) -> bool:
        if len(parts) != 1 or (self.longest is not None and parts[0].start >= self.longest):
            return False
        return is_plain(parts[0]) and super().take(parts)

    def size_of(self, parts: List[Part]) -> Size:
        return ONE

    def sizes(self) -> list[Size]:
        return [ONE]

    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        rows, lengths, seeds, known, sources, _, _ = inputs.view(7, 1)
        logits = self.step.logits(self.going_on(known, sources), lengths, self.runner.tables[rows])
        return self.draw(logits, rows, seeds), None


def persistent_steps(runner: "Runner", rows: int, asked: bool) -> list[PersistentSteps]:
    """Of a runner; none where there cannot be any, and the reason is logged, as a warning where they were asked for."""
    from tilestack.engine.persistent import PersistentStep  # brings all kernels along
    from tilestack.kernels.cuda.build import BuildError

    try:
        return [PersistentSteps(runner, rows, PersistentStep(runner), None if asked else LONGEST)]
    except ValueError as reason:
        log.log(logging.WARNING if asked else logging.INFO, "decoding is not persistent: %s", reason)
    except BuildError as problem:
        log.warning("decoding is not persistent, which is slower: %s", problem.in_short())
    except OSError as problem:  # of a disk that is full, or a library that cannot be loaded
        log.warning("decoding is not persistent, which is slower: %s", problem)
    return []
