"""The cosines and sines of RoPE that a decoder's layers share: made once, grown when a text is longer."""

from typing import Any

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.ops.rope import frequencies, tables

AT_FIRST = 4096  # positions; a model may be made for a hundred thousand and never see them


class Rotary(torch.nn.Module):
    """Tables of the positions 0, 1, … in float32, whatever the dtype of the model around them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        scaling = config.rope_scaling or {}
        self.dynamic = scaling.get("rope_type") == "dynamic"
        self.build(min(config.positions, AT_FIRST), torch.get_default_device())

    def compute(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        scaling = self.config.rope_scaling
        if self.dynamic:
            scaling = {"max_position_embeddings": self.config.positions} | (scaling or {})
        frequency, scale = frequencies(self.config.rotary_dim, self.config.rope_base, scaling, length)
        return tables(frequency.to(device), length, scale)

    def build(self, length: int, device: torch.device) -> None:
        cos, sin = self.compute(length, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), [positions, pairs], of at least `length` positions."""
        if self.dynamic and length > self.config.positions:
            return self.compute(length, self.cos.device)  # its frequencies depend on how long the text is
        if length > self.cos.shape[0]:
            self.build(max(length, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos, self.sin

    def _apply(self, fn: Any, recurse: bool = True) -> "Rotary":
        """Follow the model to its device, but not to its dtype; what was on `meta` has values from now on."""
        empty = self.cos.is_meta
        super()._apply(fn, recurse)
        if empty or self.cos.dtype != torch.float32:
            self.build(self.cos.shape[0], self.cos.device)
        return self
