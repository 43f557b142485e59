"""Scaled dot-product attention: every query's mean of the values, weighted by how well it matches their keys.

Heads of queries share heads of keys and values in groups (GQA). What a query may look at is the intersection of three
rules: causal (nothing after itself), a sliding window (nothing too far away), and documents (nothing of another text
that was packed into the same row).
"""

from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide


def visible(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys]: whether a query sees a key by their places in the row, whose ends are aligned; None when all do."""
    one_sees_all = queries == 1 and (window is None or window >= keys)
    if one_sees_all or not (causal or window is not None):
        return None
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
    reach = window or keys
    return (ahead <= 0 if causal else ahead < reach) & (ahead > -reach)


def same_document(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """[batch, length, length]: whether two tokens of a row belong to one document."""
    tokens = torch.arange(batch * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens, right=True).view(batch, length)
    return document[:, :, None] == document[:, None, :]


def attention_mask(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    """[batch or 1, queries, keys]: what each query sees; None when that is everything."""
    batch, queries, keys = *q.shape[:2], k.shape[1]
    seen = visible(queries, keys, causal, window, q.device)
    seen = None if seen is None else seen[None]
    if cu_seqlens is None:
        return seen
    together = same_document(cu_seqlens, batch, queries)
    return together if seen is None else together & seen


def attention_takes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None, softcap: float | None
) -> bool | str:
    if not (q.ndim == k.ndim == v.ndim == 4) or k.shape[:3] != v.shape[:3]:
        return (
            "q must be [batch, queries, heads, dim], k and v [batch, keys, kv_heads, dim], "
            f"but they are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q and k must agree in batch and dim, but they are {tuple(q.shape)} and {tuple(k.shape)}"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        return f"the heads of q, {q.shape[2]}, must be a multiple of those of k and v, {k.shape[2]}"
    if window is not None and window < 1:
        return f"a window holds at least the token itself, so it must be 1 or more, not {window}"
    if softcap is not None and softcap <= 0:
        return f"softcap must be positive, or None, not {softcap}"
    if cu_seqlens is None:
        return True
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        return f"cu_seqlens must be a vector of int32 or int64, not {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
    return q.shape[1] == k.shape[1] or (
        f"documents need as many keys as queries, but there are {q.shape[1]} queries and {k.shape[1]} keys"
    )


def documents_cover_rows(q: Tensor, cu_seqlens: Tensor | None) -> bool | str:
    """Whether the documents follow one another from the first token to the last, none of them across the end of a row."""
    if cu_seqlens is None:
        return True
    ends, length, tokens = cu_seqlens.tolist(), q.shape[1], q.shape[0] * q.shape[1]
    if ends != sorted(ends) or ends[:1] != [0] or ends[-1] != tokens:
        return f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, but are {ends}"
    missing = sorted(set(range(0, tokens, max(length, 1))) - set(ends))
    return not missing or f"a document crosses into another row: {missing[0]}, where a row begins, is not in cu_seqlens"


def pairs_seen(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs of one head matter, over the batch; documents are counted where their ends are known."""

    def pairs(queries: int, keys: int) -> int:
        if queries == keys and causal:
            reach = min(window or keys, keys)
            return reach * (reach + 1) // 2 + (keys - reach) * reach
        seen = visible(queries, keys, causal, window, torch.device("cpu"))
        return queries * keys if seen is None else int(seen.sum())

    if cu_seqlens is None or cu_seqlens.is_meta:
        return q.shape[0] * pairs(q.shape[1], k.shape[1])
    return sum(pairs(length, length) for length in cu_seqlens.diff().tolist())


def attention_cost(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None
) -> Cost:
    pairs = q.shape[2] * pairs_seen(q, k, cu_seqlens, causal, window)
    dim, value_dim = q.shape[3], v.shape[3]
    # The backward computes the scores again, and two products for each of the forward's.
    return Cost(flops=2 * pairs * (dim + value_dim), backward_flops=2 * pairs * (3 * dim + 2 * value_dim))


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """Heads of queries [batch, queries, heads, dim] by the keys they share: [batch, kv_heads, group · queries, dim]."""
    return wide(x).unflatten(2, (k.shape[2], x.shape[2] // k.shape[2])).permute(0, 2, 3, 1, 4).flatten(2, 3)


def ungrouped(x: Tensor, q: Tensor) -> Tensor:
    """[batch, kv_heads, group · queries, dim] back to [batch, queries, heads, dim]."""
    return x.unflatten(2, (q.shape[2] // x.shape[1], q.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)


def scale_or_usual(scale: float | None, q: Tensor) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def attention_weights(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(softmax of the scores, the scores before what is unseen was hidden), [batch, kv_heads, group · queries, keys]."""
    scores = grouped(q, k) * scale_or_usual(scale, q) @ wide(k).permute(0, 2, 3, 1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = attention_mask(q, k, cu_seqlens, causal, window)
    if seen is None:
        return torch.softmax(scores, -1), scores
    by_query = scores.unflatten(2, (q.shape[2] // k.shape[2], q.shape[1]))
    sees_some = seen.any(-1, keepdim=True)[:, None, None]  # a query that sees no key has weights of zero, not of 0 / 0
    hidden = torch.where(seen[:, None, None] | ~sees_some, by_query, -torch.inf)
    return torch.where(sees_some, torch.softmax(hidden, -1), 0).flatten(2, 3), scores


def dense(x: Tensor, like: Tensor) -> Tensor:
    """x in another's dtype, contiguous also along dimensions of one element, where `contiguous` lets any stride pass."""
    return x.to(like.dtype).clone(memory_format=torch.contiguous_format)


def attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """As every fused kernel makes it: weights computed again, and their mean gradient taken from the rounded result."""
    weights, scores = attention_weights(q, k, cu_seqlens, causal, window, scale, softcap)
    arriving, scale = grouped(grad, k), scale_or_usual(scale, q)
    mean = (arriving * grouped(out, k)).sum(-1, keepdim=True)
    dscores = weights * (arriving @ wide(v).permute(0, 2, 3, 1) - mean)
    if softcap is not None:
        dscores = dscores * (1 - (scores / softcap).square())
    dq = ungrouped(dscores @ wide(k).transpose(1, 2) * scale, q)
    dk = (dscores.mT @ (grouped(q, k) * scale)).transpose(1, 2)
    dv = (weights.mT @ arriving).transpose(1, 2)
    return dense(dq, q), dense(dk, k), dense(dv, v), None


RULES: dict[str, dict[str, Any]] = dict(
    causal={},
    full=dict(causal=False),
    window=dict(window=3),
    wide=dict(window=1024),
    scaled=dict(scale=0.3),
    capped=dict(softcap=2.0),
    around=dict(window=5, causal=False),
    documents={},
    documents_window=dict(window=2),
    documents_around=dict(window=3, causal=False),
)


def attention_case(make, batch, queries, keys, heads, kv_heads, dim, value_dim, rule):
    arguments = dict(
        q=make.normal(batch, queries, heads, dim),
        k=make.normal(batch, keys, kv_heads, dim),
        v=make.normal(batch, keys, kv_heads, value_dim),
    )
    if "documents" in rule:
        # In each row a short and a long document and two of one length; then empty ones, as padding leaves them.
        parts = (0, queries // 5, queries // 2, 3 * queries // 4)
        ends = [row * queries + part for row in range(batch) for part in parts] + 3 * [batch * queries]
        arguments["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=make.device)
    return arguments | RULES[rule]


def attention_key(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None, softcap: float | None
) -> tuple[int | str, ...]:
    batch, queries, heads, dim = q.shape
    words = (
        f"dim{dim}",  # nothing is known of one size of head from another, whose kernels are others
        "causal" if causal else "full",
        "" if cu_seqlens is None else "documents",
        "" if window is None else "window",
        "" if softcap is None else "capped",
    )
    return batch * heads, queries, k.shape[1], *words


@operator(
    cases=cases(
        attention_case,
        check=[  # batch, queries, keys, heads, kv_heads, dim, dim of v, what is seen
            (1, 1, 1, 1, 1, 8, 8, "causal"),
            (2, 9, 9, 4, 2, 16, 16, "causal"),
            (1, 33, 33, 1, 1, 8, 8, "full"),
            (2, 1, 13, 2, 1, 16, 16, "causal"),
            (1, 3, 12, 2, 2, 16, 16, "causal"),
            (1, 12, 12, 2, 1, 24, 16, "scaled"),
            (1, 2, 9, 2, 1, 16, 16, "window"),
            (1, 6, 6, 2, 2, 16, 16, "capped"),
            (2, 10, 10, 2, 1, 16, 16, "documents"),
            (1, 17, 17, 2, 1, 8, 8, "documents_window"),
            (2, 8, 8, 1, 1, 8, 8, "documents_around"),
            (1, 19, 40, 1, 1, 24, 24, "around"),
            (1, 12, 3, 1, 1, 8, 8, "around"),  # the first queries see nothing
            (2, 9, 4, 4, 2, 16, 16, "causal"),  # nor do these
            (1, 50, 6, 2, 1, 8, 8, "window"),  # nor all of the first tile's
            (1, 3, 5, 1, 1, 192, 128, "causal"),
            (1, 3, 3, 1, 1, 80, 80, "full"),
            (0, 4, 4, 2, 1, 8, 8, "causal"),
            (1, 136, 136, 1, 1, 16, 16, "causal"),  # several tiles and a rest
        ],
        gpu=[
            (2, 200, 200, 4, 2, 128, 128, "causal"),  # whole tiles and a rest, of the heads that large kernels take
            (1, 256, 256, 2, 2, 128, 128, "full"),
            (1, 70, 70, 3, 1, 128, 128, "scaled"),
            (2, 200, 200, 4, 2, 64, 64, "causal"),
            (1, 384, 384, 3, 3, 64, 64, "causal"),
            (1, 256, 256, 2, 2, 64, 64, "full"),
            (1, 129, 129, 3, 1, 64, 64, "full"),
            (1, 1, 1, 2, 1, 64, 64, "causal"),
            (2, 70, 300, 2, 1, 128, 128, "causal"),
            (1, 100, 70, 2, 1, 128, 128, "full"),
            (1, 300, 70, 2, 1, 128, 128, "causal"),  # the first queries see nothing
            (2, 250, 130, 4, 2, 64, 64, "causal"),
            (1, 129, 128, 2, 2, 64, 64, "causal"),
            (1, 200, 3, 2, 1, 80, 80, "window"),
            (2, 1, 13, 4, 2, 16, 16, "causal"),
            (1, 130, 130, 2, 1, 32, 32, "causal"),
            (2, 100, 230, 4, 1, 64, 64, "causal"),
            (1, 129, 129, 3, 1, 80, 80, "causal"),
            (1, 140, 140, 2, 1, 96, 96, "causal"),
            (1, 1, 300, 8, 1, 128, 128, "causal"),
            (1, 90, 150, 2, 2, 192, 128, "causal"),
            (1, 70, 70, 2, 1, 256, 256, "causal"),
            (1, 33, 33, 3, 1, 8, 8, "full"),
            (1, 170, 90, 2, 1, 64, 64, "full"),
            (1, 60, 110, 1, 1, 256, 256, "full"),
            (1, 150, 150, 2, 2, 32, 32, "window"),
            (1, 129, 129, 3, 1, 32, 32, "around"),
            (1, 60, 110, 2, 1, 256, 256, "capped"),  # Gemma 2
            (2, 10, 10, 4, 2, 16, 16, "documents"),
            (2, 120, 120, 2, 1, 96, 96, "documents"),
            (2, 100, 100, 4, 2, 32, 32, "documents_window"),
            (2, 8, 8, 2, 2, 8, 8, "documents_around"),
            (2, 300, 300, 4, 2, 64, 64, "documents"),  # begin and end within the tiles of large kernels
            (2, 270, 270, 2, 1, 128, 128, "documents"),
        ],
        bench=[
            (8, 2048, 2048, 16, 8, 128, 128, "causal"),  # Qwen3-0.6B
            (8, 2048, 2048, 16, 8, 128, 128, "documents"),
            (64, 256, 256, 16, 8, 128, 128, "causal"),
            (2, 4096, 4096, 32, 8, 128, 128, "causal"),  # Llama-3-8B
            (1, 16384, 16384, 32, 8, 128, 128, "causal"),
            (1, 131072, 131072, 8, 1, 128, 128, "causal"),  # Llama-3.1-70B's longest row, an eighth of its heads
            (4, 4096, 4096, 32, 32, 128, 128, "causal"),
            (4, 4096, 4096, 32, 32, 128, 128, "full"),
            (2, 4096, 4096, 32, 8, 128, 128, "wide"),
            (64, 1, 4096, 32, 8, 128, 128, "causal"),  # one step of decoding
            (2, 4096, 4096, 16, 16, 192, 128, "causal"),  # DeepSeek-V2-Lite
            (32, 1024, 1024, 8, 4, 64, 64, "causal"),
            (32, 1024, 1024, 8, 4, 64, 64, "documents"),  # recipes/demo-gpu.toml, whose rows are packed
            (2, 4096, 4096, 32, 8, 64, 64, "causal"),  # Llama-3.2-1B
            (2, 4096, 4096, 32, 32, 64, 64, "full"),
            (4, 4096, 4096, 32, 32, 64, 64, "causal"),
            (16, 1024, 1024, 16, 16, 64, 64, "causal"),
        ],
    ),
    cost=attention_cost,
    check=attention_takes,
    check_values=documents_cover_rows,
    gradient=attention_gradient,
    spreads_nan=False,
    tuning_key=attention_key,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys each query sees, in float32; [batch, queries, heads, dim of v].

    q is [batch, queries, heads, dim], k and v are [batch, keys, kv_heads, dim], heads a multiple of kv_heads. Rows are
    aligned at their ends: the last query stands at the last key, as in decoding with a cache. `causal` hides the keys
    after a query; `window` those `window` or more places away from it. `cu_seqlens` are the offsets of documents in
    the batch · queries tokens, from 0 to their number, the start of every row among them; equal offsets are empty
    documents. `scale` is 1 / √dim if not given; `softcap` c bounds scores as c · tanh(score / c). Where there are more queries
    than keys, the first may see no key; they get zeros.
    """
    weights, _ = attention_weights(q, k, cu_seqlens, causal, window, scale, softcap)
    return ungrouped(weights @ wide(v).transpose(1, 2), q).to(q.dtype)
