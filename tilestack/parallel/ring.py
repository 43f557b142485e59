"""Attention over a sequence that ranks share, in a ring: queries stay, keys and values go round.

A row is cut into 2 N chunks, and rank i has the chunks i and 2 N - 1 - i. A query sees what stands before it, so ranks in
plain order would have unequal work; in this one (zigzag) every rank has two squares of it in each round, a chunk by a chunk:

    N = 4            keys of chunk                       own keys: causal, two triangles and a square
                     0 1 2 3 4 5 6 7                     keys of a lower rank j < i: all queries see chunk j, none the other
    rank 0  chunk 0  ◣                                   keys of a higher rank j > i: the second half of the queries sees
            chunk 7  ■ ■ ■ ■ ■ ■ ■ ◣                         both chunks, the first half none
    rank 1  chunk 1  ■ ◣
            chunk 6  ■ ■ ■ ■ ■ ■ ◣                       so each round is one call of a kernel

Each round gives the result out_i of softmax over the keys that are there, and the logarithm lse_i of its denominator. Over
all keys they are

    lse = log Σ exp(lse_i)        out = Σ w_i out_i        w_i = exp(lse_i - lse)

The backward goes round once more. With the loss's gradient dO, those of a round are d_out_i = w_i dO and
d_lse_i = w_i dO · (out_i - out), so any kernel that is differentiable in both gives the gradients of its queries, keys and
values; those of keys and values travel with them and are home after N rounds. No rank ever has more than its own chunks and
those that pass by.

Documents that were packed into a row do not see each other. Between chunks at most one document matters, the one that
crosses the border between them: its keys are seen, by its queries.

Shapes: B batch, t tokens of a rank, T tokens of a row, N ranks, H heads of queries, D of queries and keys, V of values.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.models.context import AttentionLayer
from tilestack.ops.numerics import wide


@dataclass(frozen=True)
class Zigzag:
    """What one rank has of the rows, and what it sees of another's."""

    rank: int
    ranks: int
    chunk: int  # tokens of a chunk, of which each rank has two
    documents: Tensor | None = None  # [B, T]: the number of each token's document
    cu_seqlens: Tensor | None = None  # the offsets of documents in the tokens of this rank, [B, t]

    def documents_of(self, rank: int) -> Tensor:
        """[B, t]: the numbers of the documents of a rank's tokens."""
        assert self.documents is not None
        chunks = self.documents.unflatten(1, (2 * self.ranks, self.chunk))
        return torch.cat((chunks[:, rank], chunks[:, -1 - rank]), 1)


@dataclass(frozen=True)
class Round:
    """What this rank's queries see of the keys of one rank."""

    queries: slice
    keys: slice
    causal: bool = False
    cu_seqlens: Tensor | None = None
    bias: Tensor | None = None  # [B, 1, 1, keys]: -inf at those that no query of this round sees
    blind: Tensor | None = None  # [B, 1, queries]: those that see none of the keys

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """(result [B, queries, H, V], log-sum-exp [B, H, queries]); of blind queries both mean nothing."""
        return ops.flex_attention(
            q, k, v, self.cu_seqlens, bias=self.bias, causal=self.causal, scale=scale, softcap=softcap
        )  # fmt: skip

    def seen(self, lse: Tensor) -> Tensor:
        """Log-sum-exps over what queries see."""
        return lse if self.blind is None else lse.masked_fill(self.blind, -torch.inf)


def round_with(zigzag: Zigzag, other: int, dtype: torch.dtype) -> Round:
    """The round in which the keys of a rank are here."""
    rank, chunk = zigzag.rank, zigzag.chunk
    everything, first, second = slice(None), slice(0, chunk), slice(chunk, None)
    if other == rank:
        return Round(everything, everything, causal=True, cu_seqlens=zigzag.cu_seqlens)
    queries, keys = (everything, first) if other < rank else (second, everything)
    if zigzag.documents is None:
        return Round(queries, keys)
    # All keys of the round stand before this place, and all queries there or after it.
    border = (other + 1) * chunk if other < rank else (2 * zigzag.ranks - 1 - rank) * chunk
    crossing = zigzag.documents[:, border, None]
    unseen = zigzag.documents_of(other)[:, keys] != crossing
    bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
    blind = zigzag.documents_of(rank)[:, queries] != crossing
    return Round(queries, keys, bias=bias[:, None, None], blind=blind[:, None])


class Passing:
    """x on its way to the next rank of the ring, and what the rank before sends on its way here."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup):
        rank, ranks = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self.sent, self.got = x, torch.empty_like(x)  # what is sent has to stay in memory
        send, receive = dist.P2POp(dist.isend, self.sent, after, group), dist.P2POp(dist.irecv, self.got, before, group)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.got


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup,
        zigzag: Zigzag,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        kv, dims = torch.cat((k, v), -1), (k.shape[3], v.shape[3])  # one message
        batch, tokens, heads, _ = q.shape
        lse = torch.full((batch, heads, tokens), -torch.inf, dtype=sum_dtype(q), device=q.device)
        out = lse.new_zeros(batch, tokens, heads, dims[1])
        here = kv
        for turn in range(zigzag.ranks):
            passing = Passing(here, group) if turn < zigzag.ranks - 1 else None
            part = round_with(zigzag, (zigzag.rank - turn) % zigzag.ranks, q.dtype)
            keys, values = here[:, part.keys].split(dims, -1)
            part_out, part_lse = part.attend(q[:, part.queries], keys, values, scale, softcap)
            part_lse, before = part.seen(part_lse), lse[..., part.queries]
            both = torch.logaddexp(before, part_lse)  # finite from the first turn on, in which each query sees itself
            merged = out[:, part.queries] * by_query(torch.exp(before - both))
            out[:, part.queries] = merged + part_out * by_query(torch.exp(part_lse - both))
            lse[..., part.queries] = both
            here = here if passing is None else passing.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.group, ctx.zigzag, ctx.dims, ctx.rules = group, zigzag, dims, (scale, softcap)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, here, out, lse = ctx.saved_tensors
        group, zigzag, dims = ctx.group, ctx.zigzag, ctx.dims
        mean = (wide(grad) * wide(out)).sum(-1, keepdim=True)  # dO · out, [B, t, H, 1]
        dq = torch.zeros_like(q, dtype=sum_dtype(q))
        homeward: Passing | None = None  # the gradients of the keys and values that are here, from the ranks before
        for turn in range(zigzag.ranks):
            passing = Passing(here, group) if turn < zigzag.ranks - 1 else None
            part = round_with(zigzag, (zigzag.rank - turn) % zigzag.ranks, q.dtype)
            pieces = (q[:, part.queries], *here[:, part.keys].split(dims, -1))
            leaves = [piece.detach().requires_grad_() for piece in pieces]
            with torch.enable_grad():
                part_out, part_lse = part.attend(*leaves, *ctx.rules)
            weight = by_query(torch.exp(part.seen(part_lse.detach()) - lse[..., part.queries]))
            d_out = (weight * grad[:, part.queries]).to(q.dtype)
            # w dO · (out_i - out), of d_out as it was rounded, which the kernel multiplies with out_i too.
            d_lse = (wide(d_out) * wide(part_out.detach())).sum(-1, keepdim=True) - weight * mean[:, part.queries]
            part_dq, dk, dv = torch.autograd.grad((part_out, part_lse), leaves, (d_out, d_lse[..., 0].transpose(1, 2)))
            dq[:, part.queries] += part_dq
            d_here = dq.new_zeros(here.shape) if homeward is None else homeward.wait()
            d_here[:, part.keys] += torch.cat((dk, dv), -1)
            homeward = Passing(d_here, group)
            here = here if passing is None else passing.wait()
        assert homeward is not None
        dk, dv = homeward.wait().to(q.dtype).split(dims, -1)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums over rounds are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def by_query(x: Tensor) -> Tensor:
    """[B, H, queries] as [B, queries, H, 1]."""
    return x.transpose(1, 2)[..., None]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    zigzag: Zigzag,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What the queries of this rank's tokens see of the whole row, [B, t, H, V]; the rest is as `ops.attention` has it."""
    if zigzag.ranks == 1:
        return ops.attention(q, k, v, zigzag.cu_seqlens, scale=scale, softcap=softcap)
    return RingAttention.apply(q, k, v, group, zigzag, scale, softcap)


def ring_places(row: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Which tokens a rank has of a row of so many."""
    if row % (2 * ranks):
        raise ValueError(
            f"rows of {row} tokens cannot be cut into two chunks for each of {ranks} ranks: set data.sequence to a multiple of {2 * ranks}"
        )
    chunks = torch.arange(row, device=device).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


class RingContext:
    """Rows of which each rank of a group has two chunks, in zigzag order; see `Documents`."""

    keeps_latents = False

    def __init__(self, group: dist.ProcessGroup, places: Tensor, cu_seqlens: Tensor | None = None):
        """`places` are those of this rank's tokens in a row, as `ring_places` gives them; `cu_seqlens` are of whole rows."""
        self.group, self.places, self.cu_seqlens = group, places, cu_seqlens
        self.longest = len(places) * group.size()

    def start(self, batch: int, tokens: int) -> Tensor:
        self.zigzag = zigzag_of(self.group.rank(), self.group.size(), batch, tokens, self.cu_seqlens)
        return self.places

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        assert v is not None, "no latents are kept"
        if layer.window is not None and layer.window < self.longest:
            refuse_window(layer.window)
        return ring_attention(q, k, v, self.group, self.zigzag, layer.scale, layer.softcap)


def refuse_window(window: int) -> None:
    raise ValueError(
        f'a ring has no sliding windows, and the model has one of {window} tokens; set parallel.context_by = "heads"'
    )


def zigzag_of(rank: int, ranks: int, batch: int, tokens: int, cu_seqlens: Tensor | None) -> Zigzag:
    """What a rank has of rows of which it has `tokens` tokens each, with the documents of whole rows."""
    chunk, row = tokens // 2, tokens * ranks
    if cu_seqlens is None:
        return Zigzag(rank, ranks, chunk)
    all_tokens = torch.arange(batch * row, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens, all_tokens, right=True).view(batch, row)
    line, place = cu_seqlens // row, cu_seqlens % row
    inside = sum((place - start).clamp(0, chunk) for start in (rank * chunk, (2 * ranks - 1 - rank) * chunk))
    return Zigzag(rank, ranks, chunk, documents, (line * tokens + inside).to(cu_seqlens.dtype))
