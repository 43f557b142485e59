"""The cosines and sines of RoPE, of as many positions as were asked for, and grown when a text is longer still."""

from typing import Any

import torch
from torch import Tensor

from tilestack.ops.rope import frequencies, tables

Angles = tuple[Tensor, Tensor]  # cosines and sines, [positions, pairs]


class RotaryTable(torch.nn.Module):
    """Of one set of frequencies: the positions 0, 1, … in float32, whatever the dtype of the model around them.

    `text` is the length of text that the frequencies are for, where that matters to them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, base: float, scaling: dict[str, Any] | None, length: int, text: int | None = None):
        super().__init__()
        self.dim, self.base, self.scaling, self.text = dim, base, scaling, text
        self.outgrown: list[Angles] = []  # which CUDA graphs go on reading where they lie
        self.build(length, torch.get_default_device())

    def compute(self, length: int, device: torch.device, text: int | None) -> Angles:
        frequency, scale = frequencies(self.dim, self.base, self.scaling, text)
        return tables(frequency.to(device), length, scale)

    def build(self, length: int, device: torch.device) -> None:
        if device.type == "meta":  # shapes alone; to compute with those, PyTorch would load its compiler
            cos, sin = (torch.empty(length, len(range(0, self.dim, 2)), device=device) for _ in range(2))
        else:
            cos, sin = self.compute(length, device, self.text)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, length: int) -> Angles:
        """Of at least `length` positions."""
        if length > self.cos.shape[0]:
            self.outgrown.append((self.cos, self.sin))
            self.build(max(length, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos, self.sin

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryTable":
        """Follow the model to its device, but not to its dtype; what was on `meta` has values from now on."""
        empty = self.cos.is_meta
        super()._apply(fn, recurse)
        if empty or self.cos.dtype != torch.float32:
            self.build(self.cos.shape[0], self.cos.device)
        return self
