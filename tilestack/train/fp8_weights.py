"""Codes of weights, made once for a step whose micro-batches and repetitions all take the same.

Between the first micro-batch of a step and its update the weights stay what they are, so their codes may be kept, two bytes
a weight. Before and after nothing is kept: a captured step that is replayed changes weights without a word to Python, and
who evaluates the model then must not meet codes of an older step. Captured, the codes are made in the graph of the first
micro-batch, and the graph of the others reads them there.
"""

import torch
from torch import Tensor

from tilestack import ops


class WeightCodes:
    """Codes and scales both ways of the weights of a model; those of a step are kept from `begin` to `end`."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, int, tuple[Tensor, ...]]] | None = None  # by id: weight, its version, codes

    def begin(self) -> None:
        self.kept = {}

    def end(self) -> None:
        self.kept = None

    def of(self, weight: Tensor) -> tuple[Tensor, ...]:
        """(codes, scale, turned, turned_scale) of a weight, made anew where it is another than it was."""
        # What inference mode makes could not be kept for a backward.
        unkept = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if self.kept is None or unkept or not isinstance(weight, torch.nn.Parameter):
            return coded(weight)
        found = self.kept.get(id(weight))
        if found is None or found[0] is not weight or found[1] != weight._version:  # in a copy the ids are others'
            found = self.kept[id(weight)] = weight, weight._version, coded(weight)
        return found[2]


def codes_of_weight(weight: Tensor, weights: WeightCodes | None) -> tuple[Tensor, ...]:
    """The codes and scales of a weight both ways, from those of its model where they are at hand."""
    return coded(weight) if weights is None else weights.of(weight)


def coded(weight: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return ops.fp8_tiles(weight, "blocks", "blocks")
