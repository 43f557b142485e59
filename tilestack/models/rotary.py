"""The cosines and sines of RoPE that a decoder's layers share: of every position that a model is made for, and grown when
a text is longer still."""

from typing import Any

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.ops.rope import frequencies, tables

MOST_AT_FIRST = 2**20  # positions; files may claim any number

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
        self.build(length, torch.get_default_device())

    def compute(self, length: int, device: torch.device, text: int | None) -> Angles:
        frequency, scale = frequencies(self.dim, self.base, self.scaling, text)
        return tables(frequency.to(device), length, scale)

    def build(self, length: int, device: torch.device) -> None:
        cos, sin = self.compute(length, device, self.text)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, length: int) -> Angles:
        """Of at least `length` positions."""
        if length > self.cos.shape[0]:
            self.build(max(length, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos, self.sin

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryTable":
        """Follow the model to its device, but not to its dtype; what was on `meta` has values from now on."""
        empty = self.cos.is_meta
        super()._apply(fn, recurse)
        if empty or self.cos.dtype != torch.float32:
            self.build(self.cos.shape[0], self.cos.device)
        return self


class Rotary(torch.nn.Module):
    """The tables of a decoder: for layers that see everything, for layers with a window where those have a base of their
    own, and for texts so long that the frequencies are others (dynamic, longrope)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim, length = config.rotary_dim, min(config.positions, MOST_AT_FIRST)
        scaling = config.rope_scaling and {"max_position_embeddings": config.positions} | config.rope_scaling
        kind = scaling["rope_type"] if scaling else "default"
        self.most = 0  # the longest text that is read as it was trained; 0: all are
        self.local = self.long = None
        if kind == "dynamic":
            self.most = config.positions
        if scaling and kind == "longrope":
            self.most = scaling["original_max_position_embeddings"]
            self.long = RotaryTable(dim, config.rope_base, scaling, length, self.most + 1)
        self.whole = RotaryTable(dim, config.rope_base, scaling, length)
        if config.local_rope_base is not None:
            self.local = RotaryTable(dim, config.local_rope_base, None, length)

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Angles, Angles]:
        """(of layers that see everything, of layers with a window), for a text of `length` tokens.

        With positions, a text is as long as those say; what to do about it is decided on the device, and no one waits.
        """
        whole = self.of_whole(length, positions)
        return whole, whole if self.local is None else self.local(length)

    def of_whole(self, length: int, positions: Tensor | None) -> Angles:
        if self.long is not None and positions is not None:
            far = positions.max() >= self.most
            (short_cos, short_sin), (long_cos, long_sin) = self.whole(length), self.long(length)
            return torch.where(far, long_cos, short_cos), torch.where(far, long_sin, short_sin)
        if not self.most or length <= self.most:
            return self.whole(length)
        if self.long is not None:
            return self.long(length)
        return self.whole.compute(length, self.whole.cos.device, length)  # dynamic: others for every length

    def rebuild(self, device: torch.device | str) -> None:
        """Make the tables again on a device, after a model was built on `meta`."""
        for table in (self.whole, self.local, self.long):
            if table is not None:
                table.build(table.cos.shape[0], torch.device(device))
