"""What a decoder remembers of the tokens it has read, so that each is computed once."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.config import ModelConfig
from tilestack.models.context import AttentionLayer


class KVCache:
    """Keys and values (for MLA, the latents they are made from) for each row of a batch, a context of `Decoder.hidden`.

    `length` tokens are there, of at most `capacity`; all rows are equally far. A forward that is given the cache reads
    them and adds its own.
    """

    keeps_latents = True

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.layers, self.capacity, self.longest = config.layers, length, length
        self.length = 0
        self.keys, self.values = kept_zeros(config, batch, length, dtype=dtype, device=device)

    def start(self, batch: int, tokens: int) -> Tensor | None:
        if batch != self.keys.shape[1]:
            raise ValueError(f"the cache is for a batch of {self.keys.shape[1]}, not {batch}")
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens and has {self.length}; {tokens} more do not fit, make it longer"
            )
        return torch.arange(self.length, self.length + tokens, device=self.keys.device) if self.length else None

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        keys = self.stored(self.keys[layer.number], k)  # [batch, tokens, heads, dim]
        values = keys[..., : layer.value_dim]
        if v is not None and self.values is not None:
            values = self.stored(self.values[layer.number], v)
        if layer.number == self.layers - 1:
            self.length += q.shape[1]
        return ops.attention(q, keys, values, window=layer.window, scale=layer.scale, softcap=layer.softcap)

    def stored(self, kept: Tensor, new: Tensor) -> Tensor:
        """Store a layer's part of new tokens behind the others; all of them come back."""
        end = self.length + new.shape[1]
        kept[:, self.length : end] = new
        return kept[:, :end].to(new.dtype)


def kept_zeros(
    config: ModelConfig, *sizes: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Room for the keys and the values of every layer, [layers, *sizes, heads, dim]; with MLA, latents are both."""
    keys, values = config.cached_shapes
    room = lambda shape: torch.zeros(config.layers, *sizes, *shape, dtype=dtype, device=device)
    return room(keys), None if values is None else room(values)
