"""Flash attention in plain Triton, forward: scores live in registers, a tile at a time, and never reach memory.

A program owns ROWS queries of one head and walks over the keys that any of them sees. Before all of a row's scores are known
it cannot know their largest, nor the sum it must divide by; so it keeps both as far as it has come, and when a larger score
turns up, what was added before fades by the difference (the online softmax):

                 keys, KEYS at a time →
               +------+------+------+
    queries    |  s   |      |      |        top     = max(largest, max s)
    ROWS       |      |      |      |        fade    = 2^(largest - top)
               +------+------+------+        total   = total · fade + Σ 2^(s - top)
                                             values  = values · fade + 2^(s - top) @ V

A sink is a score that was there before the first key. What is left for the backward (flash_backward.py) are two numbers a
row, the largest score and 1 / total, from which any tile of the softmax is made again: 2^(s - largest) / total. Their sum as
one logarithm would do, but where scores are large, float32 would round away what tells one row's total from another's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.attention.documents import document_of
from tilestack.kernels.attention.scores import (
    LOG2_E,
    NO_TERMS,
    OF_THE_BATCH,
    Rules,
    Terms,
    at_step,
    batch_and_head,
    exponential,
    keys_seen_by,
    load_queries,
    load_tile,
    masked_scores,
    rows_times_rows,
    seen_blocks,
    store_tile,
    tile_length,
    width_of,
)
from tilestack.kernels.matmul.epilogue import dropped_of
from tilestack.kernels.matmul.naive import add_product
from tilestack.kernels.tiles import accumulator, cdiv, widened


@triton.jit(do_not_specialize=OF_THE_BATCH)
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr,  # [B, S, heads, …] three times, [B, S, 2]
    slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, sinks_ptr, order_ptr, counts_ptr,  # see Terms and seen_blocks
    out_ptr, lse_ptr, stats_ptr,  # [B, S, heads, VALUE_DIM], [B, heads, S], [B, heads, S, 2]
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    slopes_batch_stride, bias_batch_stride, bias_head_stride, bias_stride, bias_key_stride,
    blocks_batch_stride, blocks_head_stride, below,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_UNIT: tl.constexpr, GROUP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads); the last queries, which see most, come first."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = batch_and_head(tl.program_id(1), heads)
    kv_head, offset = head // GROUP, keys - queries
    query = first_query + tl.arange(0, ROWS)
    inside = query < queries
    start, end = query, query
    if DOCUMENTS:
        start, end = document_of(bounds_ptr, batch * queries + query, inside)
    low, high = keys_seen_by(first_query, start, end, offset, queries, keys, CAUSAL, WINDOW, DOCUMENTS, ROWS, KEYS)
    mask_at = batch * blocks_batch_stride + head * blocks_head_stride
    blocks_line = mask_at
    if blocks_ptr is not None:
        blocks_line += first_query // BLOCK_Q * tl.cdiv(keys, BLOCK_K)
        low, high = 0, tl.load(counts_ptr + blocks_line // tl.cdiv(keys, BLOCK_K)) * BLOCK_K

    q_ptr += batch * q_batch_stride + head * q_head_stride
    q = load_queries(q_ptr, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    slope_at = batch * slopes_batch_stride + head
    bias_at = batch * bias_batch_stride * BIAS_UNIT + head * bias_head_stride
    line = (batch * heads + head) * queries
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    if sinks_ptr is not None:
        largest = tl.zeros([ROWS], ACC) + tl.load(sinks_ptr + head).to(ACC) * (1.0 if SCALED else LOG2_E)
        total = tl.where(largest == float("-inf"), 0.0, 1.0).to(ACC)
    values = tl.zeros([ROWS, VALUE_WIDTH], ACC)
    for step in range(low, high, KEYS):
        first_key = step
        if blocks_ptr is not None:
            first_key = at_step(step, order_ptr, blocks_line, BLOCK_K)
        key = first_key + tl.arange(0, KEYS)
        there = key < keys
        k = load_tile(k_ptr, key, k_stride, k_dim_stride, there, DIM, WIDTH)
        products = rows_times_rows(q, k, ACC)
        scores, _ = masked_scores(
            products, query[:, None], key[None, :], start[:, None], end[:, None], offset, queries, keys,
            slopes_ptr, slope_at, bias_ptr, bias_at, bias_stride, bias_key_stride,
            blocks_ptr, tiles_ptr, mask_at, first_query, first_key,
            FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
        top = tl.maximum(largest, tl.max(scores, 1))
        at = tl.where(top == float("-inf"), 0.0, top)  # a row may see none of these keys, nor any before
        weights = exponential(scores - at[:, None], SCALED)
        fade = exponential(largest - at, SCALED)
        total = total * fade + tl.sum(weights, 1)
        if seed_ptr is not None:
            weights = dropped_of(weights, (line + query[:, None]) * keys + key[None, :], seed_ptr, below)
        v = load_tile(v_ptr, key, v_stride, v_dim_stride, there, VALUE_DIM, VALUE_WIDTH)
        values = add_product(values * fade[:, None], weights.to(v.dtype), v)
        largest = top
    seen = total != 0  # a query may see no key, and gets zeros
    total = tl.where(seen, total, 1.0)
    out_ptr += (batch * queries * heads + head) * VALUE_DIM
    store_tile(out_ptr, query, heads * VALUE_DIM, values / total[:, None], inside, VALUE_DIM, VALUE_WIDTH)
    if lse_ptr is not None:
        lse = largest + tl.log2(total) / LOG2_E if SCALED else (largest + tl.log2(total)) / LOG2_E
        tl.store(lse_ptr + line + query, lse, mask=inside)
    if stats_ptr is not None:
        tl.store(stats_ptr + (line + query) * 2, tl.where(seen, largest, 0.0), mask=inside)
        tl.store(stats_ptr + (line + query) * 2 + 1, tl.where(seen, 1 / total, 0.0), mask=inside)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    rules: Rules,
    terms: Terms = NO_TERMS,
    sinks: Tensor | None = None,
    *,
    lse: Tensor | None = None,
    keep_stats: bool,
) -> tuple[Tensor, Tensor | None]:
    """(the result, what the backward makes the softmax of); `lse` is written where it is given."""
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    stats = torch.empty((batch, heads, queries, 2), dtype=widened(q.dtype), device=q.device) if keep_stats else None
    width, half = max(width_of(dim), width_of(value_dim)), q.element_size() == 2
    rows = tile_length(queries, 64 if half else 32)
    crowded = width > 128 or (width > 64 and terms.blocks is not None)  # registers
    at_a_time = tile_length(keys, 16 if not half else 32 if crowded else 64)
    rows, at_a_time = terms.tile(rows, at_a_time)
    launch(
        flash_fwd_kernel, (cdiv(queries, rows), batch * heads), q, k, v, bounds,
        *terms.pointers, sinks, *seen_blocks(terms.blocks), out, lse, stats,
        queries, keys, heads, *q.stride(), *k.stride(), *v.stride(), *terms.numbers,
        **rules.constants(q.dtype), **terms.constants, GROUP=heads // kv_heads, ACC=accumulator(q.dtype), ROWS=rows, KEYS=at_a_time,
        DIM=dim, WIDTH=width_of(dim), VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim),
        num_warps=4 if half or terms.blocks is not None else 8, num_stages=1 if half and terms.load_more else 2,
    )  # fmt: skip
    return out, stats
