"""The tables of RoPE that a decoder's layers share, of every position that a model is made for."""

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.nn.rotary import Angles, RotaryTable

MOST_AT_FIRST = 2**20  # positions; files may claim any number


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
