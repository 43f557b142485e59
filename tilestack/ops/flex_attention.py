"""Attention whose scores are changed on the way, or whose mask is any set of blocks; it also returns the log-sum-exp.

    scores = scale · q kᵀ  ─softcap─▶  − slope · distance  ─▶  + bias  ─▶  -inf where a key is not seen
    weights = softmax over keys and a sink  ─dropout─▶  weights @ v

What PyTorch's flex_attention takes as functions comes as tensors here. `attention` is the same without any of it.
"""

from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import operator
from tilestack.ops.attention import (
    attention_case,
    attention_cost,
    attention_key,
    attention_mask,
    attention_takes,
    dense,
    documents_cover_rows,
    scale_or_usual,
)
from tilestack.ops.block_mask import mask_of_blocks, misfit, tiles_exist
from tilestack.ops.numerics import wide
from tilestack.ops.random import dropped_below, kept, one_seed


def flex_attention_takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    blocks: Tensor | None,
    tiles: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> bool | str:
    if (reason := attention_takes(q, k, v, cu_seqlens, causal, window, softcap)) is not True:
        return reason
    batch, queries, heads, keys = *q.shape[:3], k.shape[1]
    if sinks is not None and sinks.shape != (heads,):
        return f"sinks must have a number for each of {heads} heads, not {tuple(sinks.shape)}"
    if slopes is not None and slopes.shape not in ((heads,), (batch, heads)):
        return f"slopes must be [{heads}] or [{batch}, {heads}], a number for each head, not {tuple(slopes.shape)}"
    whole = batch, heads, queries, keys
    if bias is not None and not (
        bias.ndim == 4
        and bias.shape[3] == keys
        and all(n in (1, size) for n, size in zip(bias.shape[:3], whole[:3], strict=True))
    ):
        return f"bias must be {list(whole)}, any but the last of them may be 1, not {tuple(bias.shape)}"
    if bias is not None and not bias.is_floating_point():  # a mask, it may be, whose ones would be added to scores
        return f"bias is numbers to be added to scores, -inf where a key is hidden, not {bias.dtype}"
    if (blocks is None) != (tiles is None):
        return "blocks and tiles come together, as block_mask_arguments makes them"
    if blocks is not None and tiles is not None and (reason := misfit(blocks, tiles, whole)):
        return reason
    if dropout and seed is None:
        return f"dropout {dropout} needs a seed"
    return True if seed is None else one_seed(seed)


def documents_and_tiles_exist(
    q: Tensor, cu_seqlens: Tensor | None, blocks: Tensor | None, tiles: Tensor | None
) -> bool | str:
    reason = documents_cover_rows(q, cu_seqlens)
    return tiles_exist(blocks, tiles) if reason is True else reason


def by_head(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads or kv_heads, dim] as [batch, heads, tokens, dim], those of keys once for each query's head."""
    return wide(x).repeat_interleave(heads // max(x.shape[2], 1), 2).transpose(1, 2)


def flex_weights(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    blocks: Tensor | None,
    tiles: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax [batch, heads, queries, keys], log-sum-exp [batch, heads, queries], the scores as the cap left them)."""
    queries, heads, keys = q.shape[1], q.shape[2], k.shape[1]
    capped = by_head(q, heads) * scale_or_usual(scale, q) @ by_head(k, heads).mT
    if softcap is not None:
        capped = softcap * torch.tanh(capped / softcap)
    scores = capped
    if slopes is not None:
        ahead = torch.arange(keys, device=q.device) - torch.arange(keys - queries, keys, device=q.device)[:, None]
        scores = scores - slopes.detach().to(scores.dtype)[..., None, None] * ahead.abs()
    if bias is not None:
        scores = scores + wide(bias)
    if (seen := attention_mask(q, k, cu_seqlens, causal, window)) is not None:
        scores = torch.where(seen[:, None], scores, -torch.inf)
    if blocks is not None and tiles is not None:
        scores = torch.where(mask_of_blocks(blocks, tiles, queries, keys), scores, -torch.inf)
    sink = None if sinks is None else wide(sinks)[:, None, None]
    largest = scores.detach().amax(-1, keepdim=True) if keys else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    largest = largest if sink is None else torch.maximum(largest, sink.detach())
    largest = torch.where(largest == -torch.inf, 0, largest)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - largest)
    nothing = total == 0  # a query that sees no key has weights of zero, not of 0 / 0
    total = torch.where(nothing, 1, total)
    return powers / total, torch.where(nothing, -torch.inf, largest + torch.log(total))[..., 0], capped


def flex_dropout(weights: Tensor, seed: Tensor | None, dropout: float) -> Tensor | float:
    """What each weight is multiplied by: zero where it is dropped."""
    if seed is None or not dropout:
        return 1.0
    scale = 2**32 / max(2**32 - dropped_below(dropout), 1)
    return kept(weights, seed, dropout).to(weights.dtype) * scale


def flex_attention_gradient(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    blocks: Tensor | None,
    tiles: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor | None, ...]:
    """As every fused kernel makes it: weights computed again, and their mean gradient taken from the rounded result."""
    heads, kv_heads = q.shape[2], k.shape[2]
    weights, _, capped = flex_weights(
        q, k, cu_seqlens, sinks, slopes, bias, blocks, tiles, causal, window, scale, softcap
    )
    factor, arriving = flex_dropout(weights, seed, dropout), by_head(grad_out, heads)
    mean = (arriving * by_head(out, heads)).sum(-1, keepdim=True) - grad_lse[..., None]
    dscores = weights * (arriving @ by_head(v, heads).mT * factor - mean)
    dbias = None if bias is None else dscores.sum_to_size(bias.shape).to(bias.dtype)
    dsinks = None
    if sinks is not None:
        share = torch.where(lse == -torch.inf, 0, torch.exp(wide(sinks)[:, None] - lse))
        dsinks = -(share * mean[..., 0]).sum((0, 2)).to(sinks.dtype)
    if softcap is not None:
        dscores = dscores * (1 - (capped / softcap).square())
    by_key = lambda x: x.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)
    scale = scale_or_usual(scale, q)
    dq = (dscores @ by_head(k, heads) * scale).transpose(1, 2)
    dk = by_key(dscores.mT @ (by_head(q, heads) * scale))
    dv = by_key((weights * factor).mT @ arriving)
    return dense(dq, q), dense(dk, k), dense(dv, v), None, dsinks, None, dbias, None, None, None


def flex_attention_key(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    blocks: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> tuple[int | str, ...]:
    """That of attention, and whether there is more to it: other kernels take that."""
    more = any(term is not None for term in (sinks, slopes, bias, blocks)) or dropout
    return *attention_key(q, k, cu_seqlens, causal, window, softcap), "more" if more else ""


FLEX_RULES: dict[str, dict[str, Any]] = dict(
    plain={},
    full=dict(causal=False),
    documents={},
    sinks={},
    slopes={},
    bias=dict(causal=False),
    bias_of_heads=dict(causal=False),
    bias_of_keys=dict(causal=False),
    blocks=dict(causal=False),
    dropout=dict(dropout=0.4),
    documents_sinks_slopes=dict(window=9),
    sinks_slopes_bias_blocks_dropout=dict(causal=False, softcap=2.0, dropout=0.2),
)


def flex_attention_case(make, batch, queries, keys, heads, kv_heads, dim, value_dim, rule, block=16):
    parts = rule.split("_")
    sees = "documents" if "documents" in parts else "causal"
    arguments = attention_case(make, batch, queries, keys, heads, kv_heads, dim, value_dim, sees) | FLEX_RULES[rule]
    if "sinks" in parts:
        arguments["sinks"] = make.normal(heads)
    if "slopes" in parts:
        arguments["slopes"] = make.uniform(*((batch, heads) if "sinks" in parts else (heads,)), dtype=torch.float32)
    if "bias" in parts:
        shape = dict(bias_of_heads=(1, heads, queries), bias_of_keys=(batch, 1, 1)).get(rule, (batch, heads, queries))
        arguments["bias"] = make.normal(*shape, keys)
    if "blocks" in parts:
        drawn = make.integers(1, heads, -(-queries // block), -(-keys // block), low=-1, high=3, dtype=torch.int32)
        arguments |= dict(blocks=drawn, tiles=make.integers(2, block, block, high=2).bool())
    if "dropout" in parts:
        arguments["seed"] = make.integers(low=-(2**62), high=2**62)
    return arguments


@operator(
    cases=cases(
        flex_attention_case,
        check=[  # batch, queries, keys, heads, kv_heads, dim, dim of v, what changes the scores
            (1, 9, 12, 2, 1, 8, 8, "plain"),
            (2, 10, 10, 2, 1, 16, 16, "documents"),
            (1, 1, 1, 1, 1, 8, 8, "sinks"),
            (2, 5, 9, 2, 1, 8, 8, "sinks"),
            (1, 20, 3, 2, 1, 8, 8, "sinks"),  # the first queries see nothing but the sink
            (1, 20, 3, 2, 1, 8, 8, "slopes"),  # nothing at all
            (1, 18, 18, 2, 2, 8, 8, "slopes"),
            (1, 35, 20, 2, 1, 8, 8, "bias"),
            (1, 3, 3, 1, 1, 136, 8, "bias"),
            (2, 7, 9, 2, 2, 8, 8, "bias_of_heads"),
            (2, 20, 7, 1, 1, 8, 8, "bias_of_keys"),
            (1, 40, 37, 2, 1, 8, 8, "blocks"),
            (1, 5, 33, 1, 1, 8, 8, "dropout"),
            (2, 10, 10, 2, 1, 8, 8, "documents_sinks_slopes"),
            (2, 20, 36, 2, 1, 16, 16, "sinks_slopes_bias_blocks_dropout"),
            (0, 4, 4, 2, 1, 8, 8, "sinks"),
        ],
        gpu=[
            (2, 200, 200, 4, 2, 64, 64, "plain"),
            (1, 250, 130, 2, 1, 64, 64, "plain"),
            (1, 129, 129, 3, 1, 64, 64, "full"),
            (2, 300, 300, 4, 2, 64, 64, "documents"),
            (2, 70, 300, 2, 1, 128, 128, "plain"),
            (1, 100, 70, 2, 1, 128, 128, "full"),
            (2, 270, 270, 2, 1, 128, 128, "documents"),
            (2, 150, 150, 4, 2, 64, 64, "sinks"),
            (2, 150, 40, 4, 2, 64, 64, "slopes"),
            (1, 130, 130, 3, 1, 32, 32, "slopes"),
            (2, 90, 150, 2, 1, 64, 64, "bias"),
            (2, 100, 100, 4, 1, 64, 64, "bias_of_heads"),
            (2, 130, 200, 2, 2, 80, 80, "bias_of_keys"),
            (1, 300, 270, 2, 1, 128, 128, "blocks", 128),
            (1, 150, 150, 2, 1, 64, 64, "dropout"),
            (2, 120, 120, 2, 1, 32, 32, "documents_sinks_slopes"),
            (1, 200, 140, 4, 2, 32, 32, "sinks_slopes_bias_blocks_dropout", 32),
        ],
        bench=[
            (2, 4096, 4096, 32, 8, 128, 128, "plain"),
            (2, 4096, 4096, 64, 8, 64, 64, "sinks"),  # GPT-OSS
            (2, 4096, 4096, 16, 4, 64, 64, "bias_of_heads"),
            (2, 4096, 4096, 32, 8, 128, 128, "blocks", 128),
        ],
    ),
    cost=attention_cost,
    check=flex_attention_takes,
    check_values=documents_and_tiles_exist,
    gradient=flex_attention_gradient,
    outputs=("out", "lse"),
    spreads_nan=False,
    tuning_key=flex_attention_key,
)
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    blocks: Tensor | None = None,
    tiles: Tensor | None = None,
    seed: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the logarithm of the sum of exponentials of each query's scores, [batch, heads, queries].

    What `attention` takes means the same here. `slopes` are ALiBi's, [heads] or [batch, heads]: of a score, slope times
    the distance between query and key is taken off; they are constants and get no gradient. `bias` is added to the scores:
    [batch, heads, queries, keys], where all but the last may be 1. `blocks` and `tiles` are a mask by blocks:
    `block_mask_arguments` makes them of PyTorch's BlockMask, whose rows are not aligned at their ends. `sinks`, [heads], are
    scores of a key whose value is zero, which every query of a head sees; the log-sum-exp counts it. `dropout` drops weights
    as `ops.dropout` does elements of a tensor [batch, heads, queries, keys], with that seed. A query that sees nothing gets
    zeros, and -inf.
    """
    weights, lse, _ = flex_weights(q, k, cu_seqlens, sinks, slopes, bias, blocks, tiles, causal, window, scale, softcap)
    kept_weights = weights * flex_dropout(weights, seed, dropout)
    return (kept_weights @ by_head(v, q.shape[2])).transpose(1, 2).to(q.dtype), lse
