"""Everything at once: flash attention.

    scores  = q · kᵀ · scale, and -inf where a query may not look
    weights = softmax(scores) over the keys
    out     = weights · v                            torch.nn.functional.scaled_dot_product_attention

The scores of 8000 queries and 8000 keys are 64 million numbers for each head, which no program should write down. A
program takes a tile of queries and walks along the keys. At each step `tl.dot` gives a tile of scores, and the online
softmax, now with a top and a total for each query, turns it into weights that `tl.dot` applies to a tile of v:

                        keys, in steps of TILE ──▶
                       ┌──────┬──────┬──────┐
    a tile of queries  │ q·kᵀ │ q·kᵀ │ ░░░░ │  ░ unseen: after the query (causal), or beyond the last key
                       └──┬───┴──┬───┴──────┘
                          ▼      ▼
                      top, total, weighted [TILE, DIM], rescaled whenever top rises ──▶ weighted / total

q is [batch, queries, heads, dim], k and v are [batch, keys, kv_heads, dim]: element [b, t, h, d] of a tensor with T
tokens and H heads is at ((b · T + t) · H + h) · dim + d. Several heads of q share one of k and v.

The last query stands at the last key. So with `keys - queries` keys more than queries, query i sees the keys up to
i + keys - queries. Windows, documents, caps, queries before the first key and float32 heads beyond 64 are left out, which
`when` says.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, queries, keys, heads, kv_heads,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    query, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    place = ((batch * queries + query[:, None]) * heads + head) * DIM + d[None, :]  # of this tile in q and in out
    # begin: yours
    # | # Yours: the tile of q; along the keys the scores, the online softmax and weights · v; the store.
    # | pass
    q = tl.load(q_ptr + place, mask=query[:, None] < queries, other=0.0).to(tl.float32) * scale
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE, DIM), tl.float32)
    for start in range(0, keys, TILE):
        key = start + tl.arange(0, TILE)
        there = ((batch * keys + key[:, None]) * kv_heads + kv_head) * DIM + d[None, :]
        k = tl.load(k_ptr + there, mask=key[:, None] < keys, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + there, mask=key[:, None] < keys, other=0.0).to(tl.float32)
        seen = key[None, :] < keys
        if CAUSAL:
            seen = seen & (key[None, :] <= query[:, None] + keys - queries)
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher
    tl.store(out_ptr + place, weighted / total[:, None], mask=query[:, None] < queries)
    # end


def plain_attention(q, k, v, cu_seqlens, causal, window, scale, softcap):
    """True, or what the exercise leaves out."""
    if cu_seqlens is not None or window is not None or softcap is not None:
        return "no documents, windows or caps"
    if causal and q.shape[1] > k.shape[1]:
        return "no queries before the first key"
    dim = q.shape[3]
    if q.dtype == torch.float32 and dim > 64:
        return "no long heads in float32: added up one by one, so many products lose digits"
    return (v.shape[3] == dim and dim >= 16 and dim & (dim - 1) == 0) or f"heads of 16, 32, 64, …, not {dim}"


@implements(
    ops.attention, backend="mine", when=plain_attention, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)  # `when` says what this backend leaves out
def attention(q, k, v, cu_seqlens, causal, window, scale, softcap):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, queries, heads, dim = q.shape
    out = torch.empty_like(q)
    if q.numel():
        grid = (triton.cdiv(queries, 16), batch * heads)
        attention_kernel[grid](
            q, k, v, out, dim**-0.5 if scale is None else scale, queries, k.shape[1], heads, k.shape[2],
            DIM=dim, CAUSAL=causal, TILE=16,
        )  # fmt: skip
    return out


# begin: tutor
HINTS = [
    "Three things live through the loop: top and total, vectors of TILE, and weighted, a tile of [TILE, DIM], all in "
    "float32. Load q once, before the loop, and multiply it by scale there.",
    "k and v of a step are at ((batch * keys + key[:, None]) * kv_heads + kv_head) * DIM + d[None, :]. The scores are "
    'tl.dot(q, tl.trans(k), input_precision="ieee"), and -inf (tl.where) where key[None, :] is not below keys or, if '
    "CAUSAL, beyond query[:, None] + keys - queries.",
    "higher = tl.maximum(top, tl.max(scores, 1)); weights = tl.exp(scores - higher[:, None]); shrink = tl.exp(top - "
    "higher). Both total and weighted are multiplied by shrink before anything is added to them.",
]


def attention_with(q, k, v, causal, scale, shift=None, masked=True):
    """The definition, with the diagonal at a place of one's own."""
    groups, queries, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal and masked:
        unseen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(
            1 + (keys - queries if shift is None else shift)
        )
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


MISTAKES = {
    "query i stops at key i: with more keys than queries, the diagonal moves by `keys - queries`": (
        lambda q, k, v, causal, scale: attention_with(q, k, v, causal, scale, shift=0)
    ),
    "queries see keys that come after them": (
        lambda q, k, v, causal, scale: attention_with(q, k, v, causal, scale, masked=False)
    ),
    "the scores are not scaled": lambda q, k, v, causal: attention_with(q, k, v, causal, 1.0),
}
# end
