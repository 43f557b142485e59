"""Texts as vectors: the mean of their tokens' hidden states, or the last of them, scaled to length 1.

A text is read as prompts are, in chunks beside whatever else runs, so its states are never there all at once:

    chunk 0 ── states ──┐
    chunk 1 ── states ──┼── sum, on the device ── to the host with the last chunk ── length 1
    chunk 2 ── states ──┘

Sums are in float64, where adding thousands of float32 rounds nothing that a float32 would show: how a text was cut into
chunks, which depends on what runs beside it, leaves no trace.
"""

import torch
from torch import Tensor

from tilestack.engine.scheduler import Part
from tilestack.engine.sequence import Sequence

POOLINGS = ("mean", "last")


class Pooler:
    """Adds up the states of texts while they are read. The sum of a text is that of the tokens it has kept: one that gave way
    and begins again starts a new sum, one whose pages were swapped goes on with its own."""

    def __init__(self) -> None:
        self.sums: dict[Sequence, Tensor] = {}  # [hidden] each

    def add(self, part: Part, states: Tensor) -> Tensor | None:
        """Take the states [T, hidden] of a part; what the text has come to [hidden], if that was its end."""
        sequence = part.sequence
        if sequence.pooling == "last":
            return states[-1].double()
        found = states.sum(0, dtype=torch.float64)
        if part.start:
            found += self.sums[sequence]
        if part.ends_prompt:
            self.forget(sequence)
            return found
        self.sums[sequence] = found
        return None

    def forget(self, sequence: Sequence) -> None:
        self.sums.pop(sequence, None)


def unit_vector(total: Tensor) -> tuple[float, ...]:
    """A sum of states as a vector of length 1, in float32."""
    return tuple(torch.nn.functional.normalize(total, dim=0).float().tolist())
