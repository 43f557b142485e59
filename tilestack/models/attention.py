"""The attention of a decoder's layer: grouped-query attention, with or without norms of queries and keys.

Shapes: B batch, T new tokens, H hidden, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.models.context import AttentionLayer, Context, TurningContext
from tilestack.models.norm import Norm
from tilestack.nn import Linear
from tilestack.nn.qkv import split_and_turn
from tilestack.nn.rotary import Angles


@dataclass(frozen=True)
class Places:
    """Where the tokens of a forward stand, for all its layers."""

    positions: Tensor | None  # [B, T] or [T]; None: from 0 on
    whole: Angles  # of layers that see everything
    local: Angles  # of layers with a window


class Attention(torch.nn.Module):
    """Queries, keys and values from one projection, in that order."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = AttentionLayer(
            layer, config.head_dim, config.window(layer), config.attention_scale, config.attention_softcap
        )
        self.split = config.heads, config.kv_heads, config.kv_heads
        self.qkv = Linear(config.hidden, sum(self.split) * config.head_dim, bias=config.qkv_bias)
        self.output = Linear(config.heads * config.head_dim, config.hidden, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            together = config.qk_norm == "projection"
            self.q_norm = Norm(config.head_dim * (config.heads if together else 1), config)
            self.k_norm = Norm(config.head_dim * (config.kv_heads if together else 1), config)

    def forward(self, x: Tensor, places: Places, context: Context) -> Tensor:
        config, norms = self.config, None
        qkv = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            if config.qk_norm == "projection":
                q, k, v = qkv.split([heads * config.head_dim for heads in self.split], -1)
                qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), -1)
            else:
                norms = self.q_norm.scale, self.k_norm.scale
        heads = qkv.unflatten(-1, (-1, config.head_dim))  # [B, T, heads of q, k and v, D]
        cos, sin = places.whole if self.layer.window is None else places.local
        if isinstance(context, TurningContext):
            return self.output(
                context.attend_heads(
                    self.layer, heads, config.heads, (cos, sin), norms, config.norm_eps, config.rotary_interleaved
                ).flatten(2)
            )
        q, k, v = split_and_turn(
            heads, self.split, cos, sin, places.positions, norms, config.norm_eps, config.rotary_interleaved
        )
        return self.output(context.attend(self.layer, q, k, v).flatten(2))
