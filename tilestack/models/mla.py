"""Multi-head latent attention, DeepSeek's: keys and values of all heads are made from one small latent per token.

What is kept of a token is the latent and one rotary key for all heads, kv_rank + rope_dim numbers, where plain attention
keeps heads * (D + V). A head's query and key have a part without position, made from the latent, and a part with:

    x [H] ─┬─ q or its latent [q_rank] ── norm ── q_up ──► q  = [nope | rope]      per head
           ├─ latent [kv_rank] ────────── norm ── kv_up ─► k  = [nope | rope], v   per head
           └─ rotary key [rope_dim] ── rope ───────────────────────┘

Where latents are kept, kv_up is absorbed into what stands on either side: q · (U c) = (Uᵀ q) · c, and a mean of values
is kv_up of the mean of latents. Attention then has one head of keys, [latent | rope], whose first part is the values.

Shapes: B batch, T new tokens, H hidden, D = nope_dim + rope_dim, V = value_dim, R = kv_rank.
"""

import math

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.attention import Places
from tilestack.models.config import ModelConfig
from tilestack.models.context import AttentionLayer, Context
from tilestack.nn import Linear, RMSNorm
from tilestack.nn.mlp import is_untouched

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's own is


class LatentAttention(torch.nn.Module):
    """Queries (or their latent), the latent of keys and values, and the rotary key from one projection, in that order."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = AttentionLayer(layer, config.kv_rank, config.window(layer), attention_scale(config))
        queries = config.heads * config.head_dim
        self.split = config.q_rank or queries, config.kv_rank, config.rope_dim
        self.qkv = Linear(config.hidden, sum(self.split), bias=False)
        self.q_norm = RMSNorm(config.q_rank, eps=LATENT_EPS) if config.q_rank else None
        self.q_up = Linear(config.q_rank, queries, bias=False) if config.q_rank else None
        self.kv_norm = RMSNorm(config.kv_rank, eps=LATENT_EPS)
        self.kv_up = Linear(config.kv_rank, config.heads * (config.nope_dim + config.value_dim), bias=False)
        self.output = Linear(config.heads * config.value_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, places: Places, context: Context) -> Tensor:
        config = self.config
        q, latent, rotary = self.qkv(x).split(self.split, -1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.unflatten(-1, (config.heads, config.head_dim))  # [B, T, heads, D]
        q_nope, q_rope = q.split((config.nope_dim, config.rope_dim), -1)
        q_rope, rotary = ops.rope(q_rope, rotary[:, :, None], *places.whole, places.positions, interleaved=True)
        latent = self.kv_norm(latent)
        attend = self.absorbed if context.keeps_latents else self.spelt_out
        return self.output(attend(q_nope, q_rope, latent, rotary.to(latent.dtype), context).flatten(2))

    def spelt_out(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, rotary: Tensor, context: Context) -> Tensor:
        """[B, T, heads, V], with the keys and values of every head."""
        config = self.config
        kv = self.kv_up(latent).unflatten(-1, (config.heads, config.nope_dim + config.value_dim))
        k_nope, v = kv.split((config.nope_dim, config.value_dim), -1)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, rotary.to(k_nope.dtype).expand(-1, -1, config.heads, -1)), -1)
        return context.attend(self.layer, q, k, v)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, rotary: Tensor, context: Context) -> Tensor:
        """[B, T, heads, V], with one head of keys, of which the latents are the values."""
        config = self.config
        up = self.up_weight(q_nope).unflatten(0, (config.heads, -1))  # [heads, nope_dim + V, R]
        to_keys, to_values = up.split((config.nope_dim, config.value_dim), 1)
        q = torch.cat((by_head(q_nope, to_keys), q_rope), -1)
        k = torch.cat((latent[:, :, None], rotary), -1)
        return by_head(context.attend(self.layer, q, k, None), to_values.mT)

    def up_weight(self, like: Tensor) -> Tensor:
        """kv_up as a matrix, [heads * (nope_dim + V), R]; of a layer with an adapter or of another precision, its columns."""
        if is_untouched(self.kv_up):
            return self.kv_up.weight.to(like.dtype)
        return self.kv_up(torch.eye(self.config.kv_rank, dtype=like.dtype, device=like.device)).T


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """[B, T, heads, N] of x [B, T, heads, K], each head by its own weight, [heads, K, N]."""
    return ops.bmm(x.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1).unflatten(0, x.shape[:2])


def attention_scale(config: ModelConfig) -> float:
    """1 / √D, sharpened where YaRN stretches the model: its attention would otherwise spread with the length."""
    scaling = config.rope_scaling or {}
    weight, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor", 1)
    sharper = 0.1 * weight * math.log(factor) + 1 if weight and factor > 1 else 1.0
    return config.head_dim**-0.5 * sharper**2
