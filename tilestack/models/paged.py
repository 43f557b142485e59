"""Keys and values in pages: sequences of any lengths share one pool of memory, and one forward serves them all.

    block_tables [S, blocks]          pages [layers, pages, page, heads, dim]
      sequence 0   7 2 9 ·              page 0 is nobody's: what is padding is written there
      sequence 1   4 · · ·              page 7 holds tokens 0 … page - 1 of sequence 0, page 2 the next, …

A batch is flat, [tokens]: the new tokens of every sequence one after the other, a chunk of a prompt here and one token
of decoding there. Where they stand, what they see and where they are kept is in device tensors, so that a forward waits
for nothing and a CUDA graph can replay it with other contents.

`paged_attention` is the definition, in plain PyTorch, of what a kernel is to do.

Shapes: S sequences, T tokens, L = blocks · page.
"""

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor

from tilestack.models.cache import kept_zeros
from tilestack.models.config import ModelConfig
from tilestack.models.context import AttentionLayer
from tilestack.ops.attention import grouped, scale_or_usual
from tilestack.ops.numerics import wide


class PagedCache:
    """The pool: `pages` pages of `page` tokens for every layer. Page 0 takes what is padding, so hand out the others."""

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.page = page
        self.keys, self.values = kept_zeros(config, pages, page, dtype=dtype, device=device)


class PagedBatch:
    """The new tokens of some sequences, as a context of `Decoder.hidden`, whose ids are then [tokens].

    Sequence s has `lengths[s]` tokens with the new ones, which are cu_queries[s] to cu_queries[s + 1] of the batch; tokens
    behind the last are padding. `most_queries` bounds the new tokens of a sequence; it and the shapes are all that the
    host knows.
    """

    keeps_latents = True

    def __init__(
        self,
        cache: PagedCache,
        block_tables: Tensor,  # [S, blocks]
        lengths: Tensor,  # [S]
        cu_queries: Tensor,  # [S + 1]
        tokens: int,
        most_queries: int,
    ):
        self.cache, self.block_tables, self.lengths, self.cu_queries = cache, block_tables, lengths, cu_queries
        self.tokens, self.most_queries, self.longest = tokens, most_queries, block_tables.shape[1] * cache.page
        token = torch.arange(tokens, device=lengths.device)
        sequence = torch.searchsorted(cu_queries, token, right=True) - 1
        real = token < cu_queries[-1]
        self.sequence = sequence.clamp(max=len(lengths) - 1)  # [T]
        self.row = token - cu_queries[self.sequence]  # [T]: the token's place among the new ones of its sequence
        new = cu_queries.diff()[self.sequence]
        self.positions = torch.where(real, lengths[self.sequence] - new + self.row, 0)
        pages = block_tables[self.sequence, self.positions // cache.page]
        self.slots = torch.where(real, pages * cache.page + self.positions % cache.page, 0)
        self.row = torch.where(real, self.row, most_queries)  # padding has a row of its own

    def over(self, cache: PagedCache) -> "PagedBatch":
        """The same tokens in the same pages of another model's cache."""
        other = copy(self)
        other.cache = cache
        return other

    def start(self, batch: int, tokens: int) -> Tensor:
        if (batch, tokens) != (1, self.tokens):
            raise ValueError(f"the batch is of [{self.tokens}] tokens, not of {batch} rows of {tokens}")
        return self.positions[None]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        keys, values = self.cache.keys[layer.number], None
        write_pages(keys, self.slots, k[0])
        if v is not None and self.cache.values is not None:
            values = self.cache.values[layer.number]
            write_pages(values, self.slots, v[0])
        return paged_attention(q[0], keys, values, self, layer)[None]


def write_pages(pages: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store tokens [T, heads, dim] in their slots of the pages [pages, page, heads, dim]."""
    pages.flatten(0, 1).index_copy_(0, slots, new.to(pages.dtype))


def paged_attention(q: Tensor, keys: Tensor, values: Tensor | None, batch: PagedBatch, layer: AttentionLayer) -> Tensor:
    """What queries [T, heads, dim] see of their sequences' pages, [T, heads, dim of v], in float32 and rounded once.

    A query sees the tokens of its sequence up to its own, no more than `window` of them. Without values, they are the
    first elements of the keys.
    """
    rows = len(batch.lengths), batch.most_queries + 1
    places = batch.sequence * rows[1] + batch.row
    padded = q.new_zeros(rows[0] * rows[1], *q.shape[1:]).index_copy_(0, places, q).unflatten(0, rows)
    k = keys[batch.block_tables].flatten(1, 2)  # [S, L, kv_heads, dim]
    v = k[..., : layer.value_dim] if values is None else values[batch.block_tables].flatten(1, 2)
    there = torch.arange(k.shape[1], device=q.device) < batch.lengths[:, None]
    v = torch.where(there[..., None, None], v, 0)  # what another sequence left behind may be NaN, and 0 · NaN is too
    scores = grouped(padded, k) * scale_or_usual(layer.scale, q[None]) @ wide(k).permute(0, 2, 3, 1)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    by_query = scores.unflatten(2, (-1, rows[1]))  # [S, kv_heads, group, rows, L]
    seen = what_is_seen(batch, k.shape[1], layer.window)[:, None, None]
    weights = torch.softmax(torch.where(seen, by_query, -torch.inf), -1).flatten(2, 3)
    out = (weights @ wide(v).transpose(1, 2)).unflatten(2, (-1, rows[1]))  # [S, kv_heads, group, rows, dim of v]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[places].to(q.dtype)


def what_is_seen(batch: PagedBatch, keys: int, window: int | None) -> Tensor:
    """[S, rows, L]: which of its sequence's tokens each new token sees; a row that is nobody's sees the first."""
    row = torch.arange(batch.most_queries + 1, device=batch.lengths.device)
    place = (batch.lengths - batch.cu_queries.diff())[:, None] + row  # [S, rows]: the position of each row
    place = torch.minimum(place, batch.lengths[:, None] - 1).clamp(min=0)[..., None]
    key = torch.arange(keys, device=batch.lengths.device)
    seen = key <= place
    return seen if window is None else seen & (key > place - window)


def block_tables_of(pages: Iterable[list[int]], device: torch.device | str = "cpu") -> Tensor:
    """Lists of pages as one table, filled up with page 0."""
    rows = list(pages)
    longest = max(map(len, rows), default=0)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64, device=device)
