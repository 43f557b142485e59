"""A decoder's attention as one layer: projections under transformers' names, norms of heads, RoPE, and a cache.

    layer = nn.Attention(hidden=1024, heads=16, kv_heads=8)
    out = layer(x)                                             # rows read at once, from position 0
    cache = layer.new_cache(batch=2, capacity=2048)
    layer(prompt, cache=cache)                                 # without gradients
    layer(token, cache=cache)                                  # goes on where the last call ended

The weights of LlamaAttention, Qwen2Attention, Qwen3Attention and their like load as they are.

Shapes: B batch, T new tokens, D head_dim.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.attention import attend
from tilestack.nn.modules import Linear, RMSNorm
from tilestack.nn.rotary import RotaryTable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # it takes long to import


class KeyValueCache:
    """The keys and values of one layer for rows that go on where they ended, all equally far: `length` of `capacity`."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.keys, self.values = (
            torch.zeros(batch, capacity, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)
        )
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def check_room(self, batch: int, tokens: int) -> None:
        """Raise where new tokens of a batch do not fit."""
        if batch != self.keys.shape[0]:
            raise ValueError(f"the cache is for a batch of {self.keys.shape[0]}, not {batch}")
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens and has {self.length}; {tokens} more do not fit, make it longer"
            )

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new tokens, [B, T, kv_heads, D]; all there are come back."""
        found = self.with_new(k, v)
        self.length += k.shape[1]
        return found

    def with_new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values there are and new ones behind them, which do not count until `length` says so."""
        self.check_room(*k.shape[:2])
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a cache keeps no gradients; call the layer under torch.no_grad(), or without a cache")
        end = self.length + k.shape[1]
        self.keys[:, self.length : end] = k
        self.values[:, self.length : end] = v
        return self.keys[:, :end].to(k.dtype), self.values[:, :end].to(v.dtype)


class Attention(torch.nn.Module):
    """Grouped-query attention over what came before: [B, T, hidden] to [B, T, hidden].

    Heads are turned by RoPE, with `rope_base`, `rope_scaling` in the words of a Hugging Face config and `rotary_dim` of a
    head's elements, or left alone where the base is None. With `qk_norm`, each head of queries and keys is normalised
    first. Tables reach to `positions`, and grow with longer rows; a scaling whose frequencies depend on how long a text is
    (dynamic, longrope) has those of a text of `positions` for all, where a `Decoder` goes by the text.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope_base: float | None = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        positions: int = 2048,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if head_dim is None and hidden % heads:
            raise ValueError(f"hidden, {hidden}, is no multiple of {heads} heads: say what head_dim is")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads, {heads}, must be a multiple of kv_heads, {kv_heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or hidden // heads
        self.interleaved, self.norm_eps = interleaved, norm_eps
        self.causal, self.window, self.scale, self.softcap, self.dropout = causal, window, scale, softcap, dropout
        self.q_proj = Linear(hidden, heads * self.head_dim, bias=bias)
        self.k_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(heads * self.head_dim, hidden, bias=output_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.rotary = None
        if rope_base is not None:
            self.rotary = RotaryTable(rotary_dim or self.head_dim, rope_base, rope_scaling, positions, positions)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Room for `capacity` tokens of each of a batch's rows, where and as the layer's weights are."""
        weight = self.k_proj.weight
        return KeyValueCache(batch, capacity, self.kv_heads, self.head_dim, weight.dtype, weight.device)

    def forward(
        self,
        x: Tensor,
        mask: "Tensor | BlockMask | None" = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """What each token of x sees of those before it, in x and in the cache.

        `positions`, [T] or [B, T], are those of the cache's end on, or from 0, where they are not given; those given lie
        below the layer's `positions`. `mask` is True where a key may be seen, or is added to the scores, [B or 1, heads
        or 1, T or 1, keys], or is PyTorch's BlockMask; it comes on top of `causal` and `window`. `cu_seqlens` are the offsets
        of packed documents.
        """
        batch, tokens, _ = x.shape
        start = 0
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("documents are read at once: a cache has none")
            cache.check_room(batch, tokens)
            start = cache.length
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, T, heads or kv_heads, D]
        q, k = self.turned(q, k, positions, start)
        if cache is not None:
            k, v = cache.with_new(k, v)
        out = attend(
            q, k, v, mask, cu_seqlens=cu_seqlens, causal=self.causal, window=self.window, scale=self.scale,
            softcap=self.softcap, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        if cache is not None:
            cache.length += tokens  # only now: a call that was refused may be made again
        return self.o_proj(out.flatten(2))

    def turned(self, q: Tensor, k: Tensor, positions: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised and turned to their positions, which begin at `start` where they are not given."""
        if self.rotary is None:
            return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))
        cos, sin = self.rotary(start + q.shape[1])
        if positions is None and start:
            positions = torch.arange(start, start + q.shape[1], device=q.device)
        if self.q_norm is None or self.k_norm is None:
            return ops.rope(q, k, cos, sin, positions, self.interleaved)
        weights = self.q_norm.weight, self.k_norm.weight
        return ops.qk_norm_rope(q, k, *weights, cos, sin, positions, self.interleaved, self.norm_eps)
