"""The gradients of a bias and of sinks in flash attention: programs that own them, and walk over all that shares them.

A bias is added to scores, so its gradient is dS = P · (dP - delta), summed over the batches, heads and queries for which it is
the same:

    a program owns [ROWS, KEYS] of a bias, or [1, KEYS] where all queries have the same one
    and adds up dS of each batch, each head and, in the latter case, each tile of queries that it stands for

Scores are made a third time for that. A sink's share of a row is s = 2^(sink - largest) / total, and its value is zero, so its
gradient is the sum of -s · delta over the rows of its head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.attention.documents import document_of
from tilestack.kernels.attention.flash_backward import softmax_and_gradient
from tilestack.kernels.attention.scores import (
    LOG2_E,
    OF_THE_BATCH,
    Rules,
    Terms,
    exponential,
    load_queries,
    load_tile,
    tile_length,
    width_of,
)
from tilestack.kernels.tiles import accumulator, cdiv


@triton.jit(do_not_specialize=OF_THE_BATCH)
def flash_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr,
    grad_ptr, stats_ptr, delta_ptr, dbias_ptr,  # the last [BATCHES, HEADS, queries or 1, keys]
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    grad_batch_stride, grad_stride, grad_head_stride, grad_dim_stride,
    slopes_batch_stride, bias_batch_stride, bias_head_stride, bias_stride, bias_key_stride,
    blocks_batch_stride, blocks_head_stride, below, batches, own_batches, own_heads,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_UNIT: tl.constexpr, GROUP: tl.constexpr, ONE_ROW: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, tiles of queries or 1, batches · heads of the bias)."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    first_key = tl.program_id(0) * KEYS
    own_batch, own_head = (tl.program_id(2) // own_heads).to(tl.int64), tl.program_id(2) % own_heads
    low, high = tl.program_id(1) * ROWS, tl.minimum(tl.program_id(1) * ROWS + ROWS, queries)
    if ONE_ROW:
        low, high = 0, queries
    total = tl.zeros([ROWS, KEYS], ACC)
    for batch in range(own_batch, batches, own_batches):
        for head in range(own_head, heads, own_heads):
            far_head, far_kv_head = tl.cast(head, tl.int64), tl.cast(head // GROUP, tl.int64)
            q_at = q_ptr + batch * q_batch_stride + far_head * q_head_stride
            k_at = k_ptr + batch * k_batch_stride + far_kv_head * k_head_stride
            v_at = v_ptr + batch * v_batch_stride + far_kv_head * v_head_stride
            grad_at = grad_ptr + batch * grad_batch_stride + far_head * grad_head_stride
            line = (batch * heads + head) * queries
            for first_query in range(low, high, ROWS):
                query = first_query + tl.arange(0, ROWS)
                inside = query < queries
                start, end = query, query
                if DOCUMENTS:
                    start, end = document_of(bounds_ptr, batch * queries + query, inside)
                q = load_queries(q_at, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
                grad = load_tile(grad_at, query, grad_stride, grad_dim_stride, inside, VALUE_DIM, VALUE_WIDTH)
                largest = tl.load(stats_ptr + (line + query) * 2, mask=inside, other=0.0)
                share = tl.load(stats_ptr + (line + query) * 2 + 1, mask=inside, other=0.0)
                delta = tl.load(delta_ptr + line + query, mask=inside, other=0.0)
                weights, dweights, _, _ = softmax_and_gradient(
                    q, grad, k_at, v_at, query, first_query, first_key, start, end, largest, share, line,
                    keys - queries, queries, keys,
                    slopes_ptr, bias_ptr, blocks_ptr, tiles_ptr, seed_ptr, batch * slopes_batch_stride + head,
                    batch * bias_batch_stride * BIAS_UNIT + far_head * bias_head_stride, bias_stride, bias_key_stride,
                    batch * blocks_batch_stride + head * blocks_head_stride, below,
                    k_stride, k_dim_stride, v_stride, v_dim_stride,
                    FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K, ACC, KEYS,
                    DIM, WIDTH, VALUE_DIM, VALUE_WIDTH,
                )  # fmt: skip
                total += weights * (dweights - delta[:, None])
    key = first_key + tl.arange(0, KEYS)
    there = key < keys
    if ONE_ROW:
        line = tl.program_id(2).to(tl.int64) * keys + key
        tl.store(dbias_ptr + line, tl.sum(total, 0).to(dbias_ptr.dtype.element_ty), mask=there)
    else:
        query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        place = (tl.program_id(2).to(tl.int64) * queries + query[:, None]) * keys + key[None, :]
        inside = (query < queries)[:, None] & there[None, :]
        tl.store(dbias_ptr + place, total.to(dbias_ptr.dtype.element_ty), mask=inside)


def bias_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    stats: Tensor,
    delta: Tensor,
    rules: Rules,
    terms: Terms,
) -> Tensor | None:
    bias = terms.bias
    if bias is None:
        return None
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    most = 16 if q.element_size() != 2 else 32 if max(dim, value_dim) > 128 else 64
    rows, its_keys = terms.tile(tile_length(queries, most), tile_length(keys, most))
    one_row = bias.shape[2] == 1
    grid = cdiv(keys, its_keys), 1 if one_row else cdiv(queries, rows), bias.shape[0] * bias.shape[1]
    launch(
        flash_bwd_bias_kernel, grid, q, k, v, bounds, *terms.pointers, grad, stats, delta, dbias,
        queries, keys, heads, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *terms.numbers,
        batch, bias.shape[0], bias.shape[1],
        **rules.constants(q.dtype), **terms.constants, GROUP=heads // kv_heads, ONE_ROW=one_row, ACC=accumulator(q.dtype),
        ROWS=rows, KEYS=its_keys, DIM=dim, WIDTH=width_of(dim), VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim),
        num_warps=8 if q.element_size() == 2 else 4, num_stages=1,
    )  # fmt: skip
    return dbias


@triton.jit
def sinks_bwd_kernel(
    sinks_ptr, stats_ptr, delta_ptr, dsinks_ptr,  # [heads], [B, heads, S, 2], [B, heads, S], [heads]
    batches, heads, queries, SCALED: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (heads,)."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(ACC) * (1.0 if SCALED else LOG2_E)
    total = tl.zeros([ROWS], ACC)
    for batch in range(batches):
        line = (tl.cast(batch, tl.int64) * heads + head) * queries
        for first in range(0, queries, ROWS):
            query = first + tl.arange(0, ROWS)
            inside = query < queries
            largest = tl.load(stats_ptr + (line + query) * 2, mask=inside, other=0.0)
            share = tl.load(stats_ptr + (line + query) * 2 + 1, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + line + query, mask=inside, other=0.0)
            total -= exponential(sink - largest, SCALED) * share * delta
    tl.store(dsinks_ptr + head, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))


def sinks_gradient(sinks: Tensor | None, stats: Tensor, delta: Tensor, scaled: bool) -> Tensor | None:
    if sinks is None:
        return None
    dsinks = torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    batch, heads, queries = delta.shape
    rows = tile_length(queries, 1024)
    acc = accumulator(stats.dtype)
    launch(
        sinks_bwd_kernel, (heads,), sinks, stats, delta, dsinks, batch, heads, queries, SCALED=scaled, ACC=acc, ROWS=rows
    )  # fmt: skip
    return dsinks
