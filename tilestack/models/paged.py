"""Keys and values in pages: sequences of any lengths share one pool of memory, and one forward serves them all.

    block_tables [S, blocks]          pages [layers, pages, page, heads, dim]
      sequence 0   7 2 9 ·              page 0 is nobody's: tables are filled up with it
      sequence 1   4 · · ·              page 7 holds tokens 0 … page - 1 of sequence 0, page 2 the next, …

A batch is flat, [tokens]: the new tokens of every sequence one after the other, a chunk of a prompt here and one token
of decoding there. Where they stand, what they see and where they are kept is in device tensors, so that a forward waits
for nothing and a CUDA graph can replay it with other contents.

Attention and what fills the pages are the operators `paged_attention` and `kv_write` (ops/paged.py, ops/kv_write.py).

Shapes: S sequences, T tokens.
"""

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.cache import kept_zeros
from tilestack.models.config import ModelConfig
from tilestack.models.context import AttentionLayer
from tilestack.ops.paged import CODES

PROMPT_QUERIES = 16  # new tokens of a sequence from which on products take longer than reading


class PagedCache:
    """The pool: `pages` pages of `page` tokens for every layer. Page 0 is nobody's, so hand out the others.

    Of dtype int8 or float8_e4m3fn it holds codes, with a scale for each token and head; `key_offset`, [layers, heads, dim], is
    then what keys are written less, and with `code_queries` the queries of prompts become codes too. `longest` is the longest text that
    it will ever hold, for models whose rotation depends on that; else it is as long as a batch has pages for.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        longest: int | None = None,
        code_queries: bool = False,
    ):
        self.page, self.longest, self.code_queries = page, longest, code_queries
        self.key_offset: Tensor | None = None
        self.keys, self.values = kept_zeros(config, pages, page, dtype=dtype, device=device)
        scale_of = lambda kept: None if kept is None else torch.zeros(kept.shape[:-1], device=device)
        coded = dtype in CODES
        self.key_scale, self.value_scale = (scale_of(kept) if coded else None for kept in (self.keys, self.values))

    def tensors(self) -> list[Tensor]:
        """All that it holds, each [layers, pages, …]."""
        kept = (self.keys, self.values, self.key_scale, self.value_scale)
        return [tensor for tensor in kept if tensor is not None]

    def layer(self, number: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Keys, values, the scales of both and the offset of keys, of one layer."""
        of_layer = lambda kept: None if kept is None else kept[number]
        others = self.values, self.key_scale, self.value_scale, self.key_offset
        return self.keys[number], *map(of_layer, others)  # type: ignore[return-value]


class PagedBatch:
    """The new tokens of some sequences, as a context of `Decoder.hidden`, whose ids are then [tokens].

    Sequence s has `lengths[s]` tokens with the new ones, which are cu_queries[s] to cu_queries[s + 1] of the batch; tokens
    behind the last are padding. `most_queries` bounds the new tokens of a sequence; it and the shapes are all that the
    host knows. `places` are the sequence, position and slot of each token, where the caller knows them.
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
        places: tuple[Tensor, Tensor, Tensor] | None = None,
    ):
        self.cache, self.block_tables, self.lengths, self.cu_queries = cache, block_tables, lengths, cu_queries
        self.tokens, self.most_queries = tokens, most_queries
        self.longest = cache.longest or block_tables.shape[1] * cache.page
        self.sequences, self.positions, self.slots = places or self.find_places()

    def find_places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence, position and slot of each token."""
        cu_queries, page = self.cu_queries, self.cache.page
        token = torch.arange(self.tokens, device=cu_queries.device)
        sequence = (torch.searchsorted(cu_queries, token, right=True) - 1).clamp(max=len(self.lengths) - 1)  # [T]
        real = token < cu_queries[-1]
        before = self.lengths - cu_queries.diff()  # tokens of each sequence that are not new
        position = torch.where(real, before[sequence] + token - cu_queries[sequence], 0)
        pages = self.block_tables[sequence, position // page]
        return sequence, position, torch.where(real, pages * page + position % page, -1)

    @staticmethod
    def decoding(cache: PagedCache, block_tables: Tensor, lengths: Tensor) -> "PagedBatch":
        """One new token of each sequence, whose place takes less to find: few kernels instead of many tiny ones."""
        count, page = len(lengths), cache.page
        each, position = torch.arange(count + 1, device=lengths.device), lengths.long() - 1
        pages = block_tables.gather(1, (position // page)[:, None])[:, 0]
        places = each[:-1], position, torch.add(position % page, pages, alpha=page)
        return PagedBatch(cache, block_tables, lengths, each, tokens=count, most_queries=1, places=places)

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
        ops.kv_write(k[0], None if v is None else v[0], self.slots, *self.cache.layer(layer.number))
        return self.seen(layer, q[0])[None]

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
        keys, values, key_scale, value_scale, key_offset = self.cache.layer(layer.number)
        assert values is not None  # latents come through `attend`
        q_weight, k_weight = norms or (None, None)
        q = ops.qkv_rope_write(
            heads[0], q_weight, k_weight, *angles, self.positions, self.slots, keys, values, q_heads, interleaved, eps,
            key_scale, value_scale, key_offset,
        )  # fmt: skip
        return self.seen(layer, q)[None]

    def seen(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """What queries [T, heads, D] see of the pages."""
        keys, values, key_scale, value_scale, _ = self.cache.layer(layer.number)
        coded = self.cache.code_queries and self.most_queries >= PROMPT_QUERIES
        attend = ops.paged_attention_codes if coded else ops.paged_attention
        return attend(
            q,
            keys,
            values,
            self.block_tables,
            self.lengths,
            self.cu_queries,
            self.most_queries,
            value_dim=layer.value_dim if values is None else None,
            window=layer.window,
            scale=layer.scale,
            softcap=layer.softcap,
            key_scale=key_scale,
            value_scale=value_scale,
        )


def block_tables_of(pages: Iterable[list[int]], device: torch.device | str = "cpu") -> Tensor:
    """Lists of pages as one table, filled up with page 0."""
    rows = list(pages)
    longest = max(map(len, rows), default=0)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64, device=device)
