"""Attention over a sequence that ranks share, by heads: inside, a rank has all tokens and a share of the heads.

                 before              inside             after
              tokens   heads      tokens   heads     tokens   heads
    rank 0     0 1 │   a b c d     0 1 2 3 │ a b      0 1 │   a b c d
    rank 1     2 3 │   a b c d     0 1 2 3 │ c d      2 3 │   a b c d
                       all-to-all            all-to-all

So attention itself is the operator as it is, with its windows, caps and documents (DeepSpeed-Ulysses, 2309.14509). Where
there are fewer heads of keys than ranks, or no whole number for each, they are repeated as often as it takes; their gradients
add up again.

Shapes: B batch, t tokens of a rank, T tokens of a row, N ranks, H heads of queries, D of queries and keys, V of values.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilestack import ops
from tilestack.models.context import AttentionLayer


class AllToAll(torch.autograd.Function):
    """Part i of x, [N, …], goes to rank i, and part i of the result came from there: its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        dist.all_to_all_single(out := torch.empty_like(x), x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return AllToAll.apply(grad, ctx.group), None


def tokens_to_heads(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Tensors [B, t, heads, dim] as [B, T, heads / N, dim], in one message."""
    ranks = group.size()
    mine = [x.unflatten(2, (ranks, -1)).flatten(3) for x in parts]  # [B, t, N, heads / N · dim]
    got = AllToAll.apply(torch.cat(mine, 3).permute(2, 0, 1, 3), group)
    whole = got.transpose(0, 1).flatten(1, 2).split([x.shape[3] for x in mine], 2)
    return [x.unflatten(2, (-1, part.shape[3])) for x, part in zip(whole, parts, strict=True)]


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T, heads / N, dim] as [B, t, heads, dim]."""
    got = AllToAll.apply(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group)  # [N, B, t, heads / N, dim]
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


def attention_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What the queries of this rank's tokens see of the whole row, [B, t, H, V]; all ranks have tokens in their order.

    `cu_seqlens` are those of the whole rows; the rest is as `ops.attention` has it.
    """
    refuse_heads(q.shape[2], group.size())
    times = group.size() // math.gcd(k.shape[2], group.size())
    k, v = (x if times == 1 else x.repeat_interleave(times, 2) for x in (k, v))
    q, k, v = tokens_to_heads([q, k, v], group)
    return heads_to_tokens(ops.attention(q, k, v, cu_seqlens, window=window, scale=scale, softcap=softcap), group)


def heads_places(row: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Which tokens a rank has of a row of so many."""
    if row % ranks:
        raise ValueError(
            f"rows of {row} tokens cannot be cut into {ranks} parts: set data.sequence to a multiple of {ranks}"
        )
    return torch.arange(row, device=device).chunk(ranks)[rank]


def refuse_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        raise ValueError(
            f"{heads} heads of queries cannot be dealt to {ranks} ranks: set parallel.context to a number that divides {heads}, "
            'or parallel.context_by = "ring", which leaves heads together'
        )


class HeadsContext:
    """Rows of which each rank of a group has an equal part, in the order of ranks; see `Documents`."""

    keeps_latents = False

    def __init__(self, group: dist.ProcessGroup, places: Tensor, cu_seqlens: Tensor | None = None):
        """`places` are those of this rank's tokens in a row, as `heads_places` gives them; `cu_seqlens` are of whole rows."""
        self.group, self.places, self.cu_seqlens = group, places, cu_seqlens
        self.longest = len(places) * group.size()

    def start(self, batch: int, tokens: int) -> Tensor:
        return self.places

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        assert v is not None, "no latents are kept"
        return attention_by_heads(q, k, v, self.group, self.cu_seqlens, layer.window, layer.scale, layer.softcap)
