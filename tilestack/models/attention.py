"""The attention of a decoder's layer: grouped-query attention, with or without norms of queries and keys.

Shapes: B batch, T new tokens, S all tokens (with those in the cache), H hidden, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.cache import KVCache
from tilestack.models.config import ModelConfig
from tilestack.nn import Linear, RMSNorm
from tilestack.nn.qkv import split_and_turn


@dataclass(frozen=True)
class Context:
    """What all layers of one forward share: where each token stands, and what it may look at."""

    cos: Tensor  # [positions, pairs]
    sin: Tensor
    positions: Tensor | None  # [B, T] or [T]; None: from 0 on
    cu_seqlens: Tensor | None  # [documents + 1]
    cache: KVCache | None


class Attention(torch.nn.Module):
    """Queries, keys and values from one projection, in that order."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.split = config.heads, config.kv_heads, config.kv_heads
        self.qkv = Linear(config.hidden, sum(self.split) * config.head_dim, bias=config.qkv_bias)
        self.output = Linear(config.heads * config.head_dim, config.hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.config.head_dim))  # [B, T, heads of q, k and v, D]
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        angles = context.cos, context.sin, context.positions
        q, k, v = split_and_turn(heads, self.split, *angles, norms, self.config.norm_eps)
        if context.cache is not None:
            k, v = context.cache.add(self.layer, k, v)  # [B, S, kv_heads, D]
        out = ops.attention(q, k, v, context.cu_seqlens, window=self.window)  # [B, T, heads, D]
        return self.output(out.flatten(2))
