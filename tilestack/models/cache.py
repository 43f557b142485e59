"""What a decoder remembers of the tokens it has read, so that each is computed once."""

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig


class KVCache:
    """Keys and values (for MLA, the latents they are made from) for each row of a batch.

    `length` tokens are there, of at most `capacity`; all rows are equally far. A forward that is given the cache reads
    them and adds its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.capacity = length
        self.length = 0
        # [layers, batch, length, heads, dim]
        self.first, self.second = (
            torch.zeros(config.layers, batch, length, *shape, dtype=dtype, device=device)
            for shape in config.cached_shapes
        )

    def add(self, layer: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's part of new tokens behind the others; all of them, [batch, tokens, heads, dim], come back."""
        end = self.length + first.shape[1]
        self.first[layer, :, self.length : end] = first
        self.second[layer, :, self.length : end] = second
        return self.first[layer, :, :end].to(first.dtype), self.second[layer, :, :end].to(second.dtype)

    def check(self, batch: int, tokens: int) -> None:
        """Raise when new tokens do not fit, before any is stored."""
        if batch != self.first.shape[1]:
            raise ValueError(f"the cache is for a batch of {self.first.shape[1]}, not {batch}")
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens and has {self.length}; {tokens} more do not fit, make it longer"
            )

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has stored."""
        self.length += tokens
