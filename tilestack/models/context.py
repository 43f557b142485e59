"""How a decoder meets attention: one call, `context.attend(layer, q, k, v)`, whatever the tokens before these are kept in.

    Documents   rows that are read at once, in training and evaluation; documents packed into them do not see each other
    KVCache     rows that go on where they ended, equally far (cache.py)
    PagedBatch  sequences of any lengths side by side, their keys and values in pages of one pool (paged.py)

A layer hands over the queries, keys and values of new tokens, turned to their positions, and gets what its queries see.
With MLA, a context that keeps keys keeps latents: there is one head of keys for all queries, and its first elements are
the values, so that v is None.

Shapes: B batch, T new tokens, D of queries and keys, V of values.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tilestack import ops


@dataclass(frozen=True)
class AttentionLayer:
    """What a context has to know of a layer."""

    number: int
    value_dim: int  # of the values that are the first elements of keys
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


class Context(Protocol):
    keeps_latents: bool  # whether MLA hands over latents instead of every head's keys and values
    longest: int  # the longest text there can be, for the kinds of RoPE that depend on it; 0: the row

    def start(self, batch: int, tokens: int) -> Tensor | None:
        """Raise if new tokens do not fit, and give their positions, [B, T] or [T]; None: from 0 on."""
        ...

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """What the queries [B, T, heads, D] see, [B, T, heads, V]; keys and values, [B, T, kv_heads, …], are kept."""
        ...


@runtime_checkable
class TurningContext(Protocol):
    """A context that takes a projection as it is, and turns what it keeps on the way into its memory."""

    def attend_heads(
        self,
        layer: AttentionLayer,
        heads: Tensor,
        q_heads: int,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        interleaved: bool,
    ) -> Tensor:
        """What the queries of heads, [B, T, q + k + v heads, D], see, [B, T, q_heads, D]."""
        ...


@dataclass(frozen=True)
class Documents:
    """Rows that are read at once. `cu_seqlens` are the offsets of documents in them, as `ops.attention` takes them."""

    cu_seqlens: Tensor | None = None
    keeps_latents = False
    longest = 0

    def start(self, batch: int, tokens: int) -> None:
        return None

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        v = k[..., : layer.value_dim] if v is None else v
        return ops.attention(
            q, k, v, self.cu_seqlens, window=layer.window, scale=layer.scale, softcap=layer.softcap
        )  # fmt: skip
