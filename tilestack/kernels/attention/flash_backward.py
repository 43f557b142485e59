"""The backward of flash attention in plain Triton: the softmax made again from two numbers a row, and no atomic additions.

With P = 2^(scores - largest) / total for each row,

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P · (dP - delta)        dK = scale · dSᵀ Q        dQ = scale · dS K

where delta is Σ P · dP of the row, which is Σ dO · O. Halves take it from O, which is one tile. In wider formats the rounding
of O would be what is left of a gradient that cancels, so there the sum is made over the keys, in a walk of its own.

dK and dV are sums over queries, dQ is one over keys, so each has programs that own it and walk over the other side; those
of dQ come first and leave delta to the others:

                     keys →                          queries →
              +----+----+----+                +----+----+----+----+
    ROWS      | S  |    |    |  → dQ          | Sᵀ |    |    |    |  → dK, dV      KEYS
              +----+----+----+                +----+----+----+----+

That makes S and dP twice, seven products in place of five, and nothing has to be added up in memory: the same bits in every
run, whatever the GPU. On the right the scores are made transposed, so that Pᵀ and dSᵀ are left operands as they come, and a
program walks over the queries of every head that shares its keys. A gradient that arrives at the log-sum-exp is taken off
delta; dropout's factors stand before V on the way forth, and so on dP and on P before dO. The gradients of a bias and of
sinks (flash_bias.py) are further programs of the kind.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.attention.documents import document_of
from tilestack.kernels.attention.scores import (
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
from tilestack.kernels.tiles import accumulator, cdiv


@triton.jit
def softmax_and_gradient(
    q, grad, k_ptr, v_ptr, query, first_query, first_key, start, end, largest, share, line, offset, queries, keys,
    slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, slope_at, bias_at, bias_stride, bias_key_stride, mask_at, below,
    k_stride, k_dim_stride, v_stride, v_dim_stride,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """For some queries and KEYS keys: (P, dP, the slope of the cap, K)."""
    key = first_key + tl.arange(0, KEYS)
    there = key < keys
    k = load_tile(k_ptr, key, k_stride, k_dim_stride, there, DIM, WIDTH)
    v = load_tile(v_ptr, key, v_stride, v_dim_stride, there, VALUE_DIM, VALUE_WIDTH)
    products = rows_times_rows(q, k, ACC)
    scores, slope = masked_scores(
        products, query[:, None], key[None, :], start[:, None], end[:, None], offset, queries, keys,
        slopes_ptr, slope_at, bias_ptr, bias_at, bias_stride, bias_key_stride,
        blocks_ptr, tiles_ptr, mask_at, first_query, first_key,
        FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K,
    )  # fmt: skip
    weights = exponential(scores - largest[:, None], SCALED) * share[:, None]
    dweights = rows_times_rows(grad, v, ACC)
    if seed_ptr is not None:
        dweights = dropped_of(dweights, (line + query[:, None]) * keys + key[None, :], seed_ptr, below)
    return weights, dweights, slope, k


@triton.jit(do_not_specialize=OF_THE_BATCH)
def flash_bwd_queries_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, order_ptr, counts_ptr,
    grad_ptr, grad_lse_ptr, stats_ptr, delta_ptr, out_ptr, dq_ptr,
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    grad_batch_stride, grad_stride, grad_head_stride, grad_dim_stride,
    slopes_batch_stride, bias_batch_stride, bias_head_stride, bias_stride, bias_key_stride,
    blocks_batch_stride, blocks_head_stride, below,
    out_batch_stride, out_stride, out_head_stride, out_dim_stride,
    grad_lse_batch_stride, grad_lse_head_stride, grad_lse_stride,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_UNIT: tl.constexpr, GROUP: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads); also writes delta, for those who own keys."""
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
    grad_ptr += batch * grad_batch_stride + head * grad_head_stride
    q = load_queries(q_ptr, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
    grad = load_tile(grad_ptr, query, grad_stride, grad_dim_stride, inside, VALUE_DIM, VALUE_WIDTH)
    line = (batch * heads + head) * queries
    largest = tl.load(stats_ptr + (line + query) * 2, mask=inside, other=0.0)
    share = tl.load(stats_ptr + (line + query) * 2 + 1, mask=inside, other=0.0)
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    slope_at = batch * slopes_batch_stride + head
    bias_at = batch * bias_batch_stride * BIAS_UNIT + head * bias_head_stride
    if not SCALED:
        out_ptr += batch * out_batch_stride + head * out_head_stride
        out = load_tile(out_ptr, query, out_stride, out_dim_stride, inside, VALUE_DIM, VALUE_WIDTH)
        delta = tl.sum(out.to(ACC) * grad.to(ACC), 1)
    else:
        delta = tl.zeros([ROWS], ACC)
        for step in range(low, high, KEYS):
            first_key = step
            if blocks_ptr is not None:
                first_key = at_step(step, order_ptr, blocks_line, BLOCK_K)
            weights, dweights, _, _ = softmax_and_gradient(
                q, grad, k_ptr, v_ptr, query, first_query, first_key, start, end, largest, share, line, offset, queries, keys,
                slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, slope_at, bias_at, bias_stride, bias_key_stride, mask_at,
                below, k_stride, k_dim_stride, v_stride, v_dim_stride,
                FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K, ACC, KEYS, DIM, WIDTH, VALUE_DIM, VALUE_WIDTH,
            )  # fmt: skip
            delta += tl.sum(weights * dweights, 1)
    if grad_lse_ptr is not None:
        place = batch * grad_lse_batch_stride + head * grad_lse_head_stride + query * grad_lse_stride
        delta -= tl.load(grad_lse_ptr + place, mask=inside, other=0.0)
    tl.store(delta_ptr + line + query, delta, mask=inside)
    dq = tl.zeros([ROWS, WIDTH], ACC)
    for step in range(low, high, KEYS):
        first_key = step
        if blocks_ptr is not None:
            first_key = at_step(step, order_ptr, blocks_line, BLOCK_K)
        weights, dweights, slope, k = softmax_and_gradient(
            q, grad, k_ptr, v_ptr, query, first_query, first_key, start, end, largest, share, line, offset, queries, keys,
            slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, slope_at, bias_at, bias_stride, bias_key_stride, mask_at,
            below, k_stride, k_dim_stride, v_stride, v_dim_stride,
            FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K, ACC, KEYS, DIM, WIDTH, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
        dscores = weights * (dweights - delta[:, None]) * slope
        dq = add_product(dq, dscores.to(k.dtype), k)
    dq_ptr += (batch * queries * heads + head) * DIM
    store_tile(dq_ptr, query, heads * DIM, dq * SCALE, inside, DIM, WIDTH)


@triton.jit(do_not_specialize=OF_THE_BATCH)
def flash_bwd_keys_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, order_ptr, counts_ptr,
    grad_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    grad_batch_stride, grad_stride, grad_head_stride, grad_dim_stride,
    slopes_batch_stride, bias_batch_stride, bias_head_stride, bias_stride, bias_key_stride,
    blocks_batch_stride, blocks_head_stride, below,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_UNIT: tl.constexpr, GROUP: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, batch · heads of keys)."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    kv_heads = heads // GROUP
    first_key = tl.program_id(0) * KEYS
    batch, kv_head = batch_and_head(tl.program_id(1), kv_heads)
    offset = keys - queries
    key = first_key + tl.arange(0, KEYS)
    there = key < keys
    k_at = k_ptr + batch * k_batch_stride + kv_head * k_head_stride
    v_at = v_ptr + batch * v_batch_stride + kv_head * v_head_stride
    k = load_tile(k_at, key, k_stride, k_dim_stride, there, DIM, WIDTH)
    v = load_tile(v_at, key, v_stride, v_dim_stride, there, VALUE_DIM, VALUE_WIDTH)

    # The queries that see some of these keys; who is in a key's document stands where its end does.
    last_key = tl.minimum(first_key + KEYS, keys) - 1
    low = 0
    high = queries
    if CAUSAL:
        low = tl.maximum(first_key - offset, 0)
    if WINDOW is not None:
        high = tl.minimum(high, last_key - offset + WINDOW)
        if not CAUSAL:
            low = tl.maximum(first_key - offset - WINDOW + 1, 0)
    if DOCUMENTS:
        start, end = document_of(bounds_ptr, batch * keys + key, there)
        low = tl.maximum(low, tl.min(start, 0))
        high = tl.minimum(high, tl.max(end, 0))
    low = low // ROWS * ROWS

    dk = tl.zeros([KEYS, WIDTH], ACC)
    dv = tl.zeros([KEYS, VALUE_WIDTH], ACC)
    for in_group in range(GROUP):
        head = kv_head * GROUP + in_group
        q_at = q_ptr + batch * q_batch_stride + head * q_head_stride
        grad_at = grad_ptr + batch * grad_batch_stride + head * grad_head_stride
        line = (batch * heads + head) * queries
        slope_at = batch * slopes_batch_stride + head
        bias_at = batch * bias_batch_stride * BIAS_UNIT + head * bias_head_stride
        mask_at = batch * blocks_batch_stride + head * blocks_head_stride
        blocks_line = mask_at
        if blocks_ptr is not None:
            blocks_line += first_key // BLOCK_K * tl.cdiv(queries, BLOCK_Q)
            low, high = 0, tl.load(counts_ptr + blocks_line // tl.cdiv(queries, BLOCK_Q)) * BLOCK_Q
        for step in range(low, high, ROWS):
            first_query = step
            if blocks_ptr is not None:
                first_query = at_step(step, order_ptr, blocks_line, BLOCK_Q)
            query = first_query + tl.arange(0, ROWS)
            inside = query < queries
            q = load_queries(q_at, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
            grad = load_tile(grad_at, query, grad_stride, grad_dim_stride, inside, VALUE_DIM, VALUE_WIDTH)
            largest = tl.load(stats_ptr + (line + query) * 2, mask=inside, other=0.0)
            share = tl.load(stats_ptr + (line + query) * 2 + 1, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + line + query, mask=inside, other=0.0)
            products = rows_times_rows(k, q, ACC)
            begin, finish = query, query
            if DOCUMENTS:
                begin, finish = document_of(bounds_ptr, batch * queries + query, inside)
            scores, slope = masked_scores(
                products, query[None, :], key[:, None], begin[None, :], finish[None, :], offset, queries, keys,
                slopes_ptr, slope_at, bias_ptr, bias_at, bias_stride, bias_key_stride,
                blocks_ptr, tiles_ptr, mask_at, first_query, first_key,
                FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
            weights = exponential(scores - largest[None, :], SCALED) * share[None, :]
            dropped = weights
            dweights = rows_times_rows(v, grad, ACC)
            if seed_ptr is not None:
                place = (line + query[None, :]) * keys + key[:, None]
                dropped = dropped_of(weights, place, seed_ptr, below)
                dweights = dropped_of(dweights, place, seed_ptr, below)
            dv = add_product(dv, dropped.to(grad.dtype), grad)
            dscores = weights * (dweights - delta[None, :]) * slope
            dk = add_product(dk, dscores.to(q.dtype), q)
    dk_ptr += (batch * keys * kv_heads + kv_head) * DIM
    dv_ptr += (batch * keys * kv_heads + kv_head) * VALUE_DIM
    # Queries that were SCALED have the scale in them, and besides what took it to the cap.
    dk *= SCALE if not SCALED else 1.0 if SOFTCAP is None else SOFTCAP
    store_tile(dk_ptr, key, kv_heads * DIM, dk, there, DIM, WIDTH)
    store_tile(dv_ptr, key, kv_heads * VALUE_DIM, dv, there, VALUE_DIM, VALUE_WIDTH)


def flash_gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    out: Tensor,
    stats: Tensor,
    rules: Rules,
    terms: Terms = NO_TERMS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta)."""
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(stats.shape[:3], dtype=stats.dtype, device=stats.device)
    half, widths = q.element_size() == 2, (width_of(dim), width_of(value_dim))
    # Whoever owns keys holds two sums in registers, and takes less at a time where these, or words of dropout, are wide.
    wide, narrow = max(widths) > 128, max(widths) <= 64
    if half:
        rows, its_keys = (32, 32) if wide else (64, 64)
        its_queries = rows if narrow and terms.seed is None else 32
        keys_held = its_keys if narrow or terms.blocks is None else 32
    else:
        rows, its_keys = its_queries, keys_held = 16, 16
    named = dict(
        **rules.constants(q.dtype), **terms.constants, SCALE=rules.scale, GROUP=heads // kv_heads, ACC=accumulator(q.dtype),
        DIM=dim, WIDTH=widths[0], VALUE_DIM=value_dim, VALUE_WIDTH=widths[1], num_stages=1,
    )  # fmt: skip
    given = q, k, v, bounds, *terms.pointers
    sizes = queries, keys, heads, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *terms.numbers
    lse_strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    rows, its_keys = terms.tile(tile_length(queries, rows), tile_length(keys, its_keys))
    launch(
        flash_bwd_queries_kernel, (cdiv(queries, rows), batch * heads), *given, *seen_blocks(terms.blocks),
        grad, grad_lse, stats, delta, out, dq, *sizes, *out.stride(), *lse_strides, ROWS=rows, KEYS=its_keys, num_warps=8, **named,
    )  # fmt: skip
    its_queries, keys_held = terms.tile(tile_length(queries, its_queries), tile_length(keys, keys_held))
    launch(
        flash_bwd_keys_kernel, (cdiv(keys, keys_held), batch * kv_heads), *given, *seen_blocks(terms.blocks, transposed=True),
        grad, stats, delta, dk, dv, *sizes, ROWS=its_queries, KEYS=keys_held,
        num_warps=8 if half or terms.seed is not None or terms.load_more else 4, **named,
    )  # fmt: skip
    return dq, dk, dv, delta
