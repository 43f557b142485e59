"""Steps as CUDA graphs: all kernels of a step, from the embedding to the tokens drawn, launched with one call.

A graph has a fixed size, so a step is filled up to the next one with what is nobody's: rows that read and write page 0. What
differs from step to step comes in one small tensor, and everything else is looked up by row in the runner's tables. Without a
GPU the same functions are simply called.

Two kinds of step, each in a file of its own:

    decoding    one token for each sequence, as most steps of a busy engine are
    reading     chunks of prompts, guesses and single tokens side by side
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as List
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tilestack import ops
from tilestack.engine.scheduler import Part

if TYPE_CHECKING:
    from tilestack.engine.runner import Runner


def is_plain(part: Part) -> bool:
    """Whether all settings of a part are in the runner's tables."""
    sequence, params = part.sequence, part.sequence.params
    return (
        not sequence.adapter
        and sequence.matcher is None
        and sequence.logprobs is None
        and params.prompt_logprobs is None
        and not params.penalises
        and not params.logit_bias
        and (part.index >= params.min_tokens or not part.draws)
    )


class Size(NamedTuple):
    """What a step is filled up to."""

    tokens: int
    sequences: int


class CapturedSteps(ABC):
    """Steps of one kind, a graph for each size."""

    def __init__(self, runner: "Runner", rows: int):
        self.runner, self.rows = runner, rows
        self.padding = rows  # the row that is nobody's
        self.graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    @abstractmethod
    def take(self, parts: List[Part]) -> bool:
        """Whether a step is of this kind."""

    def arranged(self, parts: list[Part]) -> list[Part]:
        """The parts in the order that is fastest to compute."""
        return parts

    @abstractmethod
    def size_of(self, parts: List[Part]) -> Size:
        """The size that a step is filled up to."""

    @abstractmethod
    def sizes(self) -> list[Size]:
        """All there can be."""

    @abstractmethod
    def inputs(self, parts: List[Part], size: Size) -> list[int]:
        """What the device has to be told of a step; of no parts, what changes nothing."""

    @abstractmethod
    def compute(self, inputs: Tensor, size: Size) -> Tensor:
        """The tokens drawn, those of the parts first."""

    def launch(self, parts: List[Part]) -> Tensor:
        """Tokens [drawn] on the device, in the order of the parts; -1 where the logits were not finite."""
        size = self.size_of(parts)
        cuda = self.runner.device.type == "cuda"
        given = torch.tensor(self.inputs(parts, size), pin_memory=cuda)
        drawn = sum(len(part.drafts) + 1 for part in parts if part.draws)
        if not cuda:
            return self.compute(given, size)[:drawn]
        if size not in self.graphs:
            self.capture(size)
        graph, inputs, tokens = self.graphs[size]
        inputs.copy_(given, non_blocking=True)
        graph.replay()
        return tokens[:drawn]

    def capture(self, size: Size) -> None:
        inputs = torch.tensor(self.inputs([], size), device=self.runner.device)
        for _ in range(3):  # compiles kernels, and lets the operators settle on their plans
            self.compute(inputs, size)
        torch.cuda.synchronize(self.runner.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.runner.graph_memory):
            tokens = self.compute(inputs, size)
        self.runner.graph_memory = graph.pool()
        self.graphs[size] = graph, inputs, tokens

    def draw(self, logits: Tensor, rows: Tensor, seeds: Tensor) -> Tensor:
        """A token by each of these logits, for the sequences in these rows; it becomes their last."""
        runner, asked = self.runner, self.runner.sampling
        drawn = ops.sample(
            logits, seeds, asked.temperature[rows], asked.top_k[rows], asked.top_p[rows], asked.min_p[rows]
        )
        runner.last_ids.index_copy_(0, rows, drawn.clamp(min=0).long())
        return drawn

    def known_or_last(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Tokens to go on from; for -1, which only the device knows, the last that was drawn in its row."""
        return torch.where(ids < 0, self.runner.last_ids[rows], ids)
