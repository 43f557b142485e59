"""Multi-head latent attention, DeepSeek's: keys and values of all heads are made from one small latent per token.

The cache holds the latent and one rotary key for all heads, kv_rank + rope_dim numbers a token, where plain attention
holds heads * (D + V). A head's query and key have a part without position, made from the latent, and a part with:

    x [H] ─┬─ q or its latent [q_rank] ── norm ── q_up ──► q  = [nope | rope]      per head
           ├─ latent [kv_rank] ────────── norm ── kv_up ─► k  = [nope | rope], v   per head
           └─ rotary key [rope_dim] ── rope ───────────────────────┘

Shapes: B batch, T new tokens, S all tokens, H hidden, D = nope_dim + rope_dim, V = value_dim.
"""

import math

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.attention import Context
from tilestack.models.config import ModelConfig
from tilestack.nn import Linear, RMSNorm

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's own is


class LatentAttention(torch.nn.Module):
    """Queries (or their latent), the latent of keys and values, and the rotary key from one projection, in that order."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        queries = config.heads * config.head_dim
        self.split = config.q_rank or queries, config.kv_rank, config.rope_dim
        self.qkv = Linear(config.hidden, sum(self.split), bias=False)
        self.q_norm = RMSNorm(config.q_rank, eps=LATENT_EPS) if config.q_rank else None
        self.q_up = Linear(config.q_rank, queries, bias=False) if config.q_rank else None
        self.kv_norm = RMSNorm(config.kv_rank, eps=LATENT_EPS)
        self.kv_up = Linear(config.kv_rank, config.heads * (config.nope_dim + config.value_dim), bias=False)
        self.output = Linear(config.heads * config.value_dim, config.hidden, bias=False)
        self.scale = attention_scale(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        config = self.config
        q, latent, rotary = self.qkv(x).split(self.split, -1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.unflatten(-1, (config.heads, config.head_dim))  # [B, T, heads, D]
        q_nope, q_rope = q.split((config.nope_dim, config.rope_dim), -1)
        q_rope, rotary = ops.rope(q_rope, rotary[:, :, None], *context.whole, context.positions, interleaved=True)
        latent = self.kv_norm(latent)[:, :, None]  # [B, T, 1, kv_rank]
        if context.cache is not None:
            latent, rotary = context.cache.add(self.layer, latent, rotary)
        # [B, S, heads, nope_dim + V]
        kv = self.kv_up(latent[:, :, 0]).unflatten(-1, (config.heads, config.nope_dim + config.value_dim))
        k_nope, v = kv.split((config.nope_dim, config.value_dim), -1)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, rotary.to(k_nope.dtype).expand(-1, -1, config.heads, -1)), -1)
        out = ops.attention(q, k, v, context.cu_seqlens, window=self.window, scale=self.scale)  # [B, T, heads, V]
        return self.output(out.flatten(2))


def attention_scale(config: ModelConfig) -> float:
    """1 / √D, sharpened where YaRN stretches the model: its attention would otherwise spread with the length."""
    scaling = config.rope_scaling or {}
    weight, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor", 1)
    sharper = 0.1 * weight * math.log(factor) + 1 if weight and factor > 1 else 1.0
    return config.head_dim**-0.5 * sharper**2
