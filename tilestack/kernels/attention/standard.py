"""The first two rungs of the ladder, to read before flash.py: the same answer with more traffic. Backends `triton_standard`, `triton_blocked`.

Standard attention follows the formula. Every score goes to memory and comes back, in float32:

    scores_kernel    S = scale · Q Kᵀ, -inf where nothing is seen        writes S
    softmax_kernel   a row at a time                                     reads and writes S
    average_kernel   out = S V                                           reads S

Blocked attention keeps a tile of scores in registers instead and walks over the keys twice: once for each row's largest score
and sum, once more, making the scores again, for the weighted values. Nothing of the size of S exists; the keys are read
twice, and a third of the products is made twice. Flash attention is what remains when one walk does the work of both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.documents import document_bounds, document_of
from tilestack.kernels.attention.ladder import takes
from tilestack.kernels.attention.scores import (
    Rules,
    batch_and_head,
    exponential,
    keys_seen_by,
    load_queries,
    load_tile,
    masked_scores,
    rows_times_rows,
    store_tile,
    width_of,
)
from tilestack.kernels.matmul.naive import add_product
from tilestack.kernels.tiles import accumulator, cdiv, tile_of_rows, widened
from tilestack.ops.attention import scale_or_usual

ROWS = 32  # of a tile
LONGEST_ROW = 65536  # scores that one program has in registers


@triton.jit
def tile_of_scores(
    q, k, query, key, start, end, offset, queries, keys, ACC: tl.constexpr,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    products = rows_times_rows(q, k, ACC)
    scores, _ = masked_scores(
        products, query[:, None], key[None, :], start[:, None], end[:, None], offset, queries, keys,
        None, 0, None, 0, 0, 0, None, None, 0, 0, 0,
        FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS, None, None,
    )  # fmt: skip
    return scores


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, bounds_ptr, scores_ptr,  # [B, S, heads, DIM] twice, [B, S, 2], [B, heads, queries, keys]
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, tiles of keys, batch · heads)."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    batch, head = batch_and_head(tl.program_id(2), heads)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    inside, there = query < queries, key < keys
    q_ptr += batch * q_batch_stride + head * q_head_stride
    q = load_queries(q_ptr, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
    k_ptr += batch * k_batch_stride + head // GROUP * k_head_stride
    k = load_tile(k_ptr, key, k_stride, k_dim_stride, there, DIM, WIDTH)
    start, end = query, query
    if DOCUMENTS:
        start, end = document_of(bounds_ptr, batch * queries + query, inside)
    scores = tile_of_scores(
        q,
        k,
        query,
        key,
        start,
        end,
        keys - queries,
        queries,
        keys,
        ACC,
        FACTOR,
        SCALED,
        SOFTCAP,
        WINDOW,
        CAUSAL,
        DOCUMENTS,
    )
    place = scores_ptr + ((batch * heads + head) * queries + query[:, None]) * keys + key[None, :]
    tl.store(place, scores, mask=inside[:, None] & there[None, :])


@triton.jit
def softmax_kernel(scores_ptr, rows, keys, SCALED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Grid (tiles of rows,): each over all its scores."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (key < keys)
    scores = tl.load(scores_ptr + row * keys + key, mask=inside, other=float("-inf"))
    largest = tl.max(scores, 1, keep_dims=True)
    weights = exponential(scores - tl.where(largest == float("-inf"), 0.0, largest), SCALED)
    total = tl.sum(weights, 1, keep_dims=True)
    tl.store(scores_ptr + row * keys + key, weights / tl.where(total == 0, 1.0, total), mask=inside)


@triton.jit
def average_kernel(
    weights_ptr, v_ptr, out_ptr,  # [B, heads, queries, keys], [B, keys, kv_heads, DIM], [B, queries, heads, DIM]
    queries, keys, heads, v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    GROUP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads)."""
    batch, head = batch_and_head(tl.program_id(1), heads)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = query < queries
    v_ptr += batch * v_batch_stride + head // GROUP * v_head_stride
    line = weights_ptr + ((batch * heads + head) * queries + query[:, None]) * keys
    total = tl.zeros([ROWS, WIDTH], ACC)
    for first_key in range(0, keys, KEYS):
        key = first_key + tl.arange(0, KEYS)
        there = key < keys
        weights = tl.load(line + key[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        v = load_tile(v_ptr, key, v_stride, v_dim_stride, there, DIM, WIDTH)
        total = add_product(total, weights.to(v.dtype), v)
    out_ptr += (batch * queries * heads + head) * DIM
    store_tile(out_ptr, query, heads * DIM, total, inside, DIM, WIDTH)


@triton.jit
def blocked_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, out_ptr,
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads)."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    first_query = tl.program_id(0) * ROWS
    batch, head = batch_and_head(tl.program_id(1), heads)
    offset = keys - queries
    query = first_query + tl.arange(0, ROWS)
    inside = query < queries
    start, end = query, query
    if DOCUMENTS:
        start, end = document_of(bounds_ptr, batch * queries + query, inside)
    low, high = keys_seen_by(first_query, start, end, offset, queries, keys, CAUSAL, WINDOW, DOCUMENTS, ROWS, KEYS)
    q_ptr += batch * q_batch_stride + head * q_head_stride
    q = load_queries(q_ptr, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
    k_ptr += batch * k_batch_stride + head // GROUP * k_head_stride
    v_ptr += batch * v_batch_stride + head // GROUP * v_head_stride

    largest = tl.full([ROWS], float("-inf"), ACC)
    for first_key in range(low, high, KEYS):
        key = first_key + tl.arange(0, KEYS)
        k = load_tile(k_ptr, key, k_stride, k_dim_stride, key < keys, DIM, WIDTH)
        scores = tile_of_scores(
            q, k, query, key, start, end, offset, queries, keys, ACC, FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS
        )
        largest = tl.maximum(largest, tl.max(scores, 1))
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # a query may see no key
    total = tl.zeros([ROWS], ACC)
    values = tl.zeros([ROWS, VALUE_WIDTH], ACC)
    for first_key in range(low, high, KEYS):
        key = first_key + tl.arange(0, KEYS)
        there = key < keys
        k = load_tile(k_ptr, key, k_stride, k_dim_stride, there, DIM, WIDTH)
        scores = tile_of_scores(
            q, k, query, key, start, end, offset, queries, keys, ACC, FACTOR, SCALED, SOFTCAP, WINDOW, CAUSAL, DOCUMENTS
        )
        weights = exponential(scores - largest[:, None], SCALED)
        total += tl.sum(weights, 1)
        v = load_tile(v_ptr, key, v_stride, v_dim_stride, there, VALUE_DIM, VALUE_WIDTH)
        values = add_product(values, weights.to(v.dtype), v)
    out_ptr += (batch * queries * heads + head) * VALUE_DIM
    total = tl.where(total == 0, 1.0, total)
    store_tile(out_ptr, query, heads * VALUE_DIM, values / total[:, None], inside, VALUE_DIM, VALUE_WIDTH)


def keys_and_warps(q: Tensor, v: Tensor) -> dict[str, int]:
    """What multiplies without tensor cores has its operands in registers: fewer keys at a time, and for wide heads more warps."""
    half = q.element_size() == 2
    return dict(KEYS=32 if half else 16, num_warps=4 if half or max(q.shape[3], v.shape[3]) <= 128 else 8)


def takes_rows(q: Tensor, k: Tensor, v: Tensor) -> bool | str:
    if k.shape[1] > LONGEST_ROW:
        return f"a row of {k.shape[1]} scores does not fit into registers, {LONGEST_ROW} do"
    return takes(q, k, v)


@implements(ops.attention, backend="triton_standard", repeat=straight_line, when=takes_rows)
def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    bounds = document_bounds(cu_seqlens, batch, queries)
    scores = torch.empty((batch, heads, queries, keys), dtype=widened(q.dtype), device=q.device)
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    tile = dict(GROUP=heads // kv_heads, ACC=accumulator(q.dtype), ROWS=ROWS, **keys_and_warps(q, v))
    grid = cdiv(queries, ROWS), cdiv(keys, tile["KEYS"]), batch * heads
    launch(
        scores_kernel, grid, q, k, bounds, scores, queries, keys, heads, *q.stride(), *k.stride(),
        **rules.constants(q.dtype), **tile, DIM=dim, WIDTH=width_of(dim),
    )  # fmt: skip
    rows, (height, width, warps) = batch * heads * queries, tile_of_rows(keys)
    launch(
        softmax_kernel, (cdiv(rows, height),), scores, rows, keys,
        SCALED=rules.constants(q.dtype)["SCALED"], ROWS=height, WIDTH=width, num_warps=warps,
    )  # fmt: skip
    launch(
        average_kernel, (grid[0], grid[2]), scores, v, out, queries, keys, heads, *v.stride(),
        **tile, DIM=value_dim, WIDTH=width_of(value_dim),
    )  # fmt: skip
    return out


@implements(ops.attention, backend="triton_blocked", repeat=straight_line, when=takes)
def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    launch(
        blocked_fwd_kernel, (cdiv(queries, ROWS), batch * heads), q, k, v, document_bounds(cu_seqlens, batch, queries), out,
        queries, keys, heads, *q.stride(), *k.stride(), *v.stride(),
        **rules.constants(q.dtype), GROUP=heads // kv_heads, ACC=accumulator(q.dtype), ROWS=ROWS,
        DIM=dim, WIDTH=width_of(dim), VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim), **keys_and_warps(q, v),
    )  # fmt: skip
    return out
