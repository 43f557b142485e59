"""Steps as CUDA graphs: all kernels of a step, from the embedding to the tokens drawn, launched with one call.

A graph has a fixed size, so a step is filled up to the next one with what is nobody's: rows that read and write page 0. What
differs from step to step comes in one small tensor, and everything else is looked up by row in the runner's tables. Without a
GPU the same functions are simply called.

A graph draws for every sequence as the tables say. For those that ask for more (penalties, biases, a grammar,
log-probabilities, tokens before which nothing ends) it leaves its hidden states behind, and the runner draws once more, for
these alone: the others' step is the same with them as without.

Two kinds of step, each in a file of its own:

    decoding    one token for each sequence, as most steps of a busy engine are
    reading     chunks of prompts, guesses and single tokens side by side
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from tilestack import ops
from tilestack.engine.scheduler import Part
from tilestack.engine.transfer import to_pinned

if TYPE_CHECKING:
    from tilestack.engine.runner import Runner


def is_plain(part: Part) -> bool:
    """Whether a part's tokens are drawn as the runner's tables say, and no more is told of them."""
    return part.index >= part.sequence.plain_from or not part.draws


class Size(NamedTuple):
    """What a step is filled up to, and whether adapters are in it."""

    tokens: int
    sequences: int
    adapted: bool = False


class Captured(NamedTuple):
    """A graph, what it reads and what it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    tokens: Tensor
    hidden: Tensor | None


class CapturedSteps(ABC):
    """Steps of one kind, a graph for each size."""

    def __init__(self, runner: "Runner", rows: int):
        self.runner, self.rows = runner, rows
        self.padding = rows  # the row that is nobody's
        self.graphs: dict[Size, Captured] = {}

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
    def inputs(self, parts: List[Part], size: Size) -> list[int] | numpy.ndarray:
        """What the device has to be told of a step; of no parts, what changes nothing."""

    @abstractmethod
    def compute(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor | None]:
        """The tokens drawn, those of the parts first, and the hidden states that they were drawn by; None in steps that are
        for plain parts alone."""

    def launch(self, parts: List[Part]) -> tuple[Tensor, Tensor | None]:
        """Tokens [drawn] on the device, in the order of the parts, -1 where the logits were not finite, and their hidden
        states, until the next step."""
        size = self.size_of(parts)
        cuda = self.runner.device.type == "cuda"
        given = to_pinned(self.inputs(parts, size), self.runner.device)
        drawn = sum(len(part.drafts) + 1 for part in parts if part.draws)
        if not cuda:
            tokens, hidden = self.compute(given, size)
            return tokens[:drawn], hidden
        if size not in self.graphs:
            self.runner.compile_ahead([(self, size)])
            self.capture(size)
        captured = self.graphs[size]
        captured.inputs.copy_(given, non_blocking=True)
        captured.graph.replay()
        return captured.tokens[:drawn], captured.hidden

    def compute_nothing(self, size: Size) -> Tensor:
        """Compute a step of no parts, and answer what it was told."""
        inputs = torch.tensor(self.inputs([], size), device=self.runner.device)
        self.compute(inputs, size)
        return inputs

    def capture(self, size: Size) -> None:
        inputs = self.compute_nothing(size)  # compiles kernels that are not compiled yet
        for _ in range(2):  # lets the operators settle on their plans
            self.compute(inputs, size)
        torch.cuda.synchronize(self.runner.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.runner.graph_memory):
            tokens, hidden = self.compute(inputs, size)
        self.runner.graph_memory = graph.pool()
        self.graphs[size] = Captured(graph, inputs, tokens, hidden)

    def with_and_without_adapters(self) -> tuple[bool, ...]:
        """What steps may have: adapters cost what nobody else should pay for."""
        return (False,) if self.runner.adapters is None else (False, True)

    def adapters_of(self, rows: Tensor, size: Size) -> AbstractContextManager[None]:
        """Inside, tokens of sequences in these rows go through their adapters, where a step has any."""
        runner = self.runner
        if runner.adapters is None or not size.adapted:
            return nullcontext()
        return runner.adapters.chosen(runner.adapter_of[rows])

    def going_on(self, known: Tensor, sources: Tensor) -> Tensor:
        """Tokens to go on from: what the host knows, or 0 and in whose row they were drawn last. There -1 stands for logits that
        were not finite, and in the row of nobody, which is the source of what is known."""
        return torch.maximum(known, self.runner.last_ids[sources])

    def draw(self, logits: Tensor, rows: Tensor, seeds: Tensor) -> Tensor:
        """A token by each of these logits, for the sequences in these rows; it becomes their last."""
        runner, asked = self.runner, self.runner.sampling
        drawn = ops.sample(logits, seeds, *asked.of_rows(rows))
        runner.last_ids.index_copy_(0, rows, drawn.long())
        return drawn
