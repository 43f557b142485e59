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

What is left for the backward (flash_backward.py) are two numbers a row, the largest score and 1 / total, from which any tile
of the softmax is made again: 2^(s - largest) / total. Their sum as one logarithm would do, but where scores are large,
float32 would round away what tells one row's total from another's. Scores are in powers of two, the scale having log₂ e in it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.activation import tanh_of
from tilestack.kernels.tiles import accumulator, cdiv, next_power, widened

LOG2_E = tl.constexpr(1.4426950408889634)
WIDEST_HEAD = 256


@triton.jit
def document_bounds_kernel(cu_ptr, bounds_ptr, tokens, documents, length, BLOCK: tl.constexpr):
    """For every token, the first token of its document and the one after its last, counted from the start of its row."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = low + documents
    steps = documents
    while steps > 0:  # the last of the offsets that is not behind the token
        middle = (low + high + 1) // 2
        before = tl.load(cu_ptr + middle, mask=inside, other=0) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
        steps = steps // 2
    row = token // length * length
    tl.store(bounds_ptr + 2 * token, (tl.load(cu_ptr + low, mask=inside, other=0) - row).to(tl.int32), mask=inside)
    end = tl.load(cu_ptr + tl.minimum(low + 1, documents), mask=inside, other=0)
    tl.store(bounds_ptr + 2 * token + 1, (end - row).to(tl.int32), mask=inside)


def document_bounds(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor | None:
    """[batch, length, 2], int32; None without documents."""
    if cu_seqlens is None:
        return None
    bounds = torch.empty((batch, length, 2), dtype=torch.int32, device=cu_seqlens.device)
    tokens, documents = batch * length, cu_seqlens.shape[0] - 1
    launch(
        document_bounds_kernel,
        (cdiv(tokens, 128),),
        cu_seqlens.contiguous(),
        bounds,
        tokens,
        documents,
        length,
        BLOCK=128,
    )
    return bounds


@triton.jit
def load_tile(ptr, row, row_stride, dim_stride, there, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of a head, whose first DIM elements exist; zero where nothing is."""
    element = tl.arange(0, WIDTH)
    inside = there[:, None]
    if DIM != WIDTH:
        inside = inside & (element < DIM)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * row_stride + element[None, :] * dim_stride, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, row, row_stride, value, there, DIM: tl.constexpr, WIDTH: tl.constexpr):
    element = tl.arange(0, WIDTH)
    inside = there[:, None] & (element < DIM)[None, :]
    place = ptr + row.to(tl.int64)[:, None] * row_stride + element[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_queries(ptr, row, row_stride, dim_stride, there, FACTOR: tl.constexpr, SCALED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Queries, where SCALED already times what scores are multiplied by: of large scores that keeps a rounding away."""
    q = load_tile(ptr, row, row_stride, dim_stride, there, DIM, WIDTH)
    return q * FACTOR if SCALED else q


@triton.jit
def scores_of(products, FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """(scores in powers of two, what a gradient is multiplied by on its way back through the cap)."""
    if not SCALED:
        products = products * FACTOR
    if SOFTCAP is None:
        return products, 1.0
    else:
        bent = tanh_of(products, False)
        return bent * (SOFTCAP * LOG2_E), (1 - bent) * (1 + bent)


@triton.jit
def sees(query, key, start, end, offset, keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Which queries see which keys; all four come broadcast against each other, start and end those of the query."""
    seen = key < keys
    ahead = key - query - offset
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOW is not None:
        seen = seen & (ahead > -WINDOW)
        if not CAUSAL:
            seen = seen & (ahead < WINDOW)
    if DOCUMENTS:
        seen = seen & (key >= start) & (key < end)
    return seen


@triton.jit
def document_of(bounds_ptr, at, there, DOCUMENTS: tl.constexpr):
    """(first token, token after the last) of the documents of some tokens; anything where there are none."""
    start, end = at, at
    if DOCUMENTS:
        start = tl.load(bounds_ptr + 2 * at, mask=there, other=2147483647)
        end = tl.load(bounds_ptr + 2 * at + 1, mask=there, other=0)
    return start, end


@triton.jit
def keys_seen_by(
    first_query, start, end, offset, queries, keys,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(the first key, on a tile, and the one after the last) that some of ROWS queries see."""
    last_query = tl.minimum(first_query + ROWS, queries) - 1
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, last_query + offset + 1)
    if WINDOW is not None:
        low = tl.maximum(first_query + offset - WINDOW + 1, 0)
        if not CAUSAL:
            high = tl.minimum(high, last_query + offset + WINDOW)
    if DOCUMENTS:
        low = tl.maximum(low, tl.min(start, 0))
        high = tl.minimum(high, tl.max(end, 0))
    return low // KEYS * KEYS, high


@triton.jit
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, out_ptr, lse_ptr,  # [B, S, heads, …] five times but for bounds; [B, heads, S]
    queries, keys, heads,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, k_batch_stride, k_stride, k_head_stride, k_dim_stride,
    v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads); the last queries, which see most, come first."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    kv_head, offset = head // GROUP, keys - queries
    query = first_query + tl.arange(0, ROWS)
    inside = query < queries
    start, end = document_of(bounds_ptr, batch * queries + query, inside, DOCUMENTS)
    low, high = keys_seen_by(first_query, start, end, offset, queries, keys, CAUSAL, WINDOW, DOCUMENTS, ROWS, KEYS)

    q_ptr += batch * q_batch_stride + head * q_head_stride
    q = load_queries(q_ptr, query, q_stride, q_dim_stride, inside, FACTOR, SCALED, DIM, WIDTH)
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    values = tl.zeros([ROWS, VALUE_WIDTH], ACC)
    for first_key in range(low, high, KEYS):
        key = first_key + tl.arange(0, KEYS)
        there = key < keys
        k = load_tile(k_ptr, key, k_stride, k_dim_stride, there, DIM, WIDTH)
        products = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        scores, _ = scores_of(products, FACTOR, SCALED, SOFTCAP)
        seen = sees(query[:, None], key[None, :], start[:, None], end[:, None], offset, keys, CAUSAL, WINDOW, DOCUMENTS)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        at = tl.where(top == float("-inf"), 0.0, top)  # a row may see none of these keys, nor any before
        weights = tl.exp2(scores - at[:, None])
        fade = tl.exp2(largest - at)
        total = total * fade + tl.sum(weights, 1)
        v = load_tile(v_ptr, key, v_stride, v_dim_stride, there, VALUE_DIM, VALUE_WIDTH)
        values = tl.dot(weights.to(v.dtype), v, values * fade[:, None], input_precision="ieee", out_dtype=ACC)
        largest = top
    out_ptr += (batch * queries * heads + head) * VALUE_DIM
    store_tile(out_ptr, query, heads * VALUE_DIM, values / total[:, None], inside, VALUE_DIM, VALUE_WIDTH)
    if lse_ptr is not None:
        line = lse_ptr + ((batch * heads + head) * queries + query) * 2
        tl.store(line, largest, mask=inside)
        tl.store(line + 1, 1 / total, mask=inside)


class Rules(NamedTuple):
    """What decides on scores and who sees what, as constants of the kernels."""

    scale: float
    softcap: float | None
    window: int | None
    causal: bool

    @property
    def factor(self) -> float:
        """Of products of queries and keys, scores are this many times as large, before a cap and in powers of two after."""
        return self.scale * LOG2_E.value if self.softcap is None else self.scale / self.softcap

    def constants(self, dtype: torch.dtype) -> dict:
        return dict(
            FACTOR=self.factor,
            SCALED=dtype == widened(dtype),  # a half would be rounded
            SOFTCAP=self.softcap,
            WINDOW=self.window,
            CAUSAL=self.causal,
        )


def width_of(dim: int) -> int:
    """Elements of a tile's row: a power of two, and no fewer than tensor cores multiply."""
    return max(next_power(dim), 16)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, rules: Rules, keep_lse: bool
) -> tuple[Tensor, Tensor | None]:
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries, 2), dtype=widened(q.dtype), device=q.device) if keep_lse else None
    width, half = max(width_of(dim), width_of(value_dim)), q.element_size() == 2
    tile = lambda length, most: min(max(next_power(length), 16), most)
    rows = tile(queries, 64 if half else 32)
    at_a_time = tile(keys, 16 if not half else 64 if width <= 128 else 32)
    launch(
        flash_fwd_kernel, (cdiv(queries, rows), batch * heads), q, k, v, bounds, out, lse,
        queries, keys, heads, *q.stride(), *k.stride(), *v.stride(),
        **rules.constants(q.dtype), GROUP=heads // kv_heads, ACC=accumulator(q.dtype), ROWS=rows, KEYS=at_a_time,
        DIM=dim, WIDTH=width_of(dim), VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim),
        num_warps=4 if half else 8, num_stages=2,
    )  # fmt: skip
    return out, lse
