"""Steps that only decode, as CUDA graphs: nothing but one token for each sequence, and only the plain settings.

Most steps of a busy engine are such, and a graph launches all of their kernels, from the embedding to the token drawn, with
one call. A graph has a fixed size, so a batch is filled up to the next with rows that are nobody's: they read and write
page 0. What differs from step to step is one small tensor,

    inputs [4, size]     the rows, how long their sequences are with the new token, the seeds of their noise, and the
                         tokens to go on from, -1 for those that only the device knows

and everything else is looked up by row in the runner's tables. Without a GPU the same function is simply called. A batch of
one may go through the decoder as a single kernel (persistent.py), where that is asked for.

Shapes: G sequences, those that fill up included.
"""

import logging
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilestack import ops
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch

if TYPE_CHECKING:
    from tilestack.engine.persistent import PersistentStep
    from tilestack.engine.runner import Runner

log = logging.getLogger(__name__)


def sizes_up_to(most: int) -> list[int]:
    """Sizes of graphs: dense where a row more matters, and the most there can be."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def is_plain(part: Part) -> bool:
    """Whether a part is one token of decoding whose settings are all in the tables."""
    sequence, params = part.sequence, part.sequence.params
    return (
        part.count == 1
        and part.draws
        and not part.drafts
        and not sequence.adapter
        and sequence.matcher is None
        and sequence.logprobs is None
        and not params.penalises
        and not params.logit_bias
        and part.index >= params.min_tokens
    )


def persistent_step(runner: "Runner") -> "PersistentStep | None":
    """The step as a single kernel; where there is none, the reason is logged and decoding goes on as usual."""
    from tilestack.engine.persistent import PersistentStep  # brings all kernels along

    try:
        return PersistentStep(runner)
    except ValueError as reason:
        log.warning("decoding is not persistent: %s", reason)
        return None


class DecodingSteps:
    def __init__(self, runner: "Runner", rows: int, persistent: bool = False):
        self.runner, self.sizes, self.padding = runner, sizes_up_to(rows), rows
        self.persistent = persistent_step(runner) if persistent else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def take(self, parts: List[Part]) -> bool:
        return bool(parts) and self.runner.draft is None and all(map(is_plain, parts))

    def launch(self, parts: List[Part]) -> Tensor:
        """Tokens [len(parts)] on the device; -1 where the logits were not finite."""
        size = next(size for size in self.sizes if size >= len(parts))
        more = size - len(parts)
        sequences = [part.sequence for part in parts]
        given = torch.tensor(
            [
                [sequence.row for sequence in sequences] + [self.padding] * more,
                [part.start + 1 for part in parts] + [1] * more,
                [part.sequence.seed + part.index for part in parts] + [0] * more,
                [-1 if sequence.in_flight > 1 else sequence.ids[-1] for sequence in sequences] + [0] * more,
            ],
            pin_memory=self.runner.device.type == "cuda",
        )
        if self.runner.device.type != "cuda":
            return self.compute(given)[: len(parts)]
        if size not in self.graphs:
            self.capture(size)
        graph, inputs, drawn = self.graphs[size]
        inputs.copy_(given, non_blocking=True)
        graph.replay()
        return drawn[: len(parts)]

    def compute(self, inputs: Tensor) -> Tensor:
        """One token for each row of `inputs` [4, G]."""
        runner, (rows, lengths, seeds, known) = self.runner, inputs
        ids = torch.where(known < 0, runner.last_ids[rows], known)
        if self.persistent is not None and len(rows) == 1:
            logits = self.persistent.logits(ids, lengths, runner.tables[rows])
        else:
            each = torch.arange(len(rows) + 1, device=rows.device)
            batch = PagedBatch(runner.cache, runner.tables[rows], lengths, each, tokens=len(rows), most_queries=1)
            logits = runner.decoder.logits(runner.decoder.hidden(ids, context=batch)).float()
        settings = runner.sampling
        drawn = ops.sample(
            logits, seeds, settings.temperature[rows], settings.top_k[rows], settings.top_p[rows], settings.min_p[rows]
        )
        runner.last_ids.index_copy_(0, rows, drawn.clamp(min=0).long())
        return drawn

    def capture(self, size: int) -> None:
        """Record the step for a size; all sizes share their memory, since one runs at a time."""
        inputs = torch.tensor([[self.padding], [1], [0], [0]], device=self.runner.device).repeat(1, size)
        self.compute(inputs)  # compiles kernels, and lets the operators settle on their plans
        self.compute(inputs)
        self.compute(inputs)
        torch.cuda.synchronize(self.runner.device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            drawn = self.compute(inputs)
        self.graphs[size] = graph, inputs, drawn
