"""`flex_attention` in plain Triton: the kernels of flash attention with everything that changes scores and weights.

What a call does not give costs nothing, being a constant None of the kernel.
"""

from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.attention.flash import flash_forward
from tilestack.kernels.attention.flash_backward import flash_gradients
from tilestack.kernels.attention.flash_bias import bias_gradient, sinks_gradient
from tilestack.kernels.attention.ladder import empty_stats, takes
from tilestack.kernels.attention.scores import Rules, Terms
from tilestack.kernels.tiles import widened
from tilestack.ops.attention import scale_or_usual

BLOCK_MULTIPLE = 16  # rows and columns that tensor cores multiply


def flex_takes(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor | None) -> bool | str:
    if tiles is not None and any(size % BLOCK_MULTIPLE for size in tiles.shape[1:]):
        return f"its blocks are multiples of {BLOCK_MULTIPLE}, not {tiles.shape[1]} x {tiles.shape[2]}"
    return takes(q, k, v)


def flex_forward(
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
    *,
    keep_stats: bool = True,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """((the result, the log-sum-exp), what the backward makes the softmax of)."""
    batch, queries, heads, _ = q.shape
    lse = torch.empty((batch, heads, queries), dtype=widened(q.dtype), device=q.device)
    out, stats = flash_forward(
        q,
        k,
        v,
        document_bounds(cu_seqlens, batch, queries),
        Rules(scale_or_usual(scale, q), softcap, window, causal),
        Terms.of(q, slopes, bias, blocks, tiles, seed, dropout),
        None if sinks is None else sinks.contiguous(),
        lse=lse,
        keep_stats=keep_stats,
    )
    return (out, lse), stats


def flex_backward_from_stats(
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
    needs: tuple[bool, ...],
    out: Tensor,
    stats: Tensor,
) -> tuple[Tensor | None, ...]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    terms = Terms.of(q, slopes, bias, blocks, tiles, seed, dropout)
    *gradients, delta = flash_gradients(grad_out, grad_lse, q, k, v, bounds, out, stats, rules, terms)
    wanted = dict(zip(ops.flex_attention.tensors, needs, strict=True))
    scaled = rules.constants(q.dtype)["SCALED"]
    dsinks = (
        sinks_gradient(None if sinks is None else sinks.contiguous(), stats, delta, scaled) if wanted["sinks"] else None
    )
    dbias = bias_gradient(grad_out, q, k, v, bounds, stats, delta, rules, terms) if wanted["bias"] else None
    return *gradients, None, dsinks, None, dbias, None, None, None


def flex_backward(
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
    needs: tuple[bool, ...],
    out: Tensor,
) -> tuple[Tensor | None, ...]:
    """Where nothing was handed on: it is made again."""
    given = q, k, v, cu_seqlens, sinks, slopes, bias, blocks, tiles, seed, causal, window, scale, softcap, dropout
    _, stats = flex_forward(*given)
    assert stats is not None
    return flex_backward_from_stats(grad_out, grad_lse, *given, needs, out, stats)


@implements(
    ops.flex_attention,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=flex_backward,
    extras=Extras(flex_forward, flex_backward_from_stats, when=lambda q: True, fake=empty_stats),
    when=flex_takes,
)
def flex_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return flex_forward(*arguments, keep_stats=False)[0]
