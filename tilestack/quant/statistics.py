"""What calibration keeps of a layer's inputs: how large they are, and how they go together. Never the inputs themselves.

    largest   [in]       max |x_j|        for SmoothQuant
    squares   [in]       E[x_j²]          for clipping
    moments   [in, in]   E[x_i x_j]       for GPTQ and AWQ

Sums are in float64, so that the order of batches changes no more than the last digits of products in float32.
"""

import torch
from torch import Tensor

from tilestack.ops.numerics import wide

KINDS = ("largest", "squares", "moments")


class InputStatistics:
    """One kind of statistics of inputs [..., in], summed up as they come."""

    def __init__(self, kind: str):
        self.kind = kind
        self.count = 0
        self.kept: Tensor | None = None

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        rows = wide(inputs.flatten(0, -2))
        self.count += len(rows)
        if self.kind == "largest":
            found = rows.abs().amax(0)
            self.kept = found if self.kept is None else torch.maximum(self.kept, found)
            return
        found = (rows.square().sum(0) if self.kind == "squares" else rows.T @ rows).double()
        self.kept = found if self.kept is None else self.kept.add_(found)

    def result(self, name: str) -> Tensor:
        """What was found of the layer of that name."""
        if self.kept is None:
            raise ValueError(f"{name} saw no input: calibration texts did not reach it")
        if not bool(torch.isfinite(self.kept).all()):
            raise ValueError(f"the inputs of {name} are not finite: the model overflows on the calibration texts")
        return self.kept if self.kind == "largest" else self.kept / self.count


def scaled_statistics(found: Tensor, scale: Tensor) -> Tensor:
    """What is known of inputs once they are divided by a scale, of largest magnitudes or of second moments."""
    scale = scale.to(found)
    return found / scale if found.ndim == 1 else found / torch.outer(scale, scale)


def shrunk(found: Tensor, rows: int) -> Tensor:
    """Second moments as they are best believed when they are of few rows: n rows of K inputs show products of two inputs that
    are no rule, so these count n / (n + K). Without it GPTQ of about as many rows as inputs does worse than rounding to nearest
    where inputs are independent; with it, it did not for any number of rows that was tried, and no worse where they are not."""
    if found.ndim == 1:
        return found
    diagonal = torch.diag(found.diagonal())
    return diagonal + (found - diagonal) * (rows / (rows + len(found)))
