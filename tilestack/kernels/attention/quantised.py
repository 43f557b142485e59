"""Flash attention of codes in plain Triton: two small kernels make codes of keys and values, the third multiplies them.

    part_sums_kernel    sums of some tokens' keys, of each channel; of values, their largest magnitudes
    codes_kernel        keys less their mean, and values, as codes: 128 keys and a head to a program
    codes_fwd_kernel    flash attention (flash.py). A program makes the codes of its queries itself.

What codes are, and that they have no bit of freedom, is in ops/quantised_attention.py. They lie as tensor cores want them, in
whole blocks, so that nothing that reads them asks where they end:

    k_codes  [batch, kv_heads, blocks · 128, width]        a key's channels side by side
    v_codes  [batch, kv_heads, width, blocks · 128]        a channel's keys side by side, in the order below

    keys of sixteen      0 1 2 3 4 5 6 7 8 9 …             tensor cores leave scores of two neighbours, and of the two that
    order of v_codes     0 1 8 9 2 3 10 11 4 5 12 13 …     are eight further, in one thread, and take four neighbours of 8-bit
                                                           weights from it: those four are made neighbours

A walk over keys has three parts, of which only the middle one, tiles that all queries see whole, does without a mask. All
scales of a tile are one factor for each row. Tops are whole powers of two, so that fading is exact and weights of 8 bits are
the same whatever the top was when they were made. Where codes are floating point, tensor cores add up with few bits: the
values of each tile are added outside.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.documents import document_bounds, document_of
from tilestack.kernels.attention.parts import finite_or_zero
from tilestack.kernels.attention.scores import (
    LOG2_E,
    WIDEST_HEAD,
    batch_and_head,
    keys_seen_by,
    load_tile,
    store_tile,
    tile_length,
    width_of,
)
from tilestack.kernels.quantised.codes import NO_FRACTION, SMALLEST_ROW, magnitudes, reads_fp8
from tilestack.kernels.tiles import cdiv, next_power, shared_memory
from tilestack.ops import quantised_attention
from tilestack.ops.attention import scale_or_usual
from tilestack.ops.quantised import LARGEST_CODE
from tilestack.ops.quantised_attention import BLOCK

HOPPER_SHARED = 200_000  # bytes of shared memory that none before Hopper has
HALVES = (torch.float16, torch.bfloat16)
LEAST_WIDTH = 32  # codes that tensor cores multiply at a time
MOST_HEADS = 65_535  # of a whole batch, which lie along the second side of a grid
MOST_PARTS = 32  # of a sum over tokens
TOKENS = 32  # that a part adds up at a time
LARGEST_FP8 = tl.constexpr(LARGEST_CODE[torch.float8_e4m3fn])
LOG2_TOP = tl.constexpr(float(quantised_attention.LOG2_TOP))


@triton.jit
def exact_scale(largest, LARGEST: tl.constexpr):
    """The scale with which the largest magnitude is the largest code, NaN where that is not finite: as in ops.quantised, with
    no rounding left to the compiler."""
    scale = tl.div_rn(tl.maximum(largest, SMALLEST_ROW), tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def exact_codes(x, scale, CODES: tl.constexpr):
    """The codes nearest to x / scale; 0 for a NaN where they are integers."""
    codes = tl.div_rn(x, scale + tl.zeros_like(x))
    if tl.int8 == CODES:
        codes = (tl.where(codes == codes, codes, 0.0) + NO_FRACTION) - NO_FRACTION
    return codes.to(CODES)


@triton.jit
def part_sums_kernel(
    k_ptr, v_ptr, sums_ptr, tops_ptr,  # [B, S, kv_heads, …] twice, [B, kv_heads, PARTS, WIDTH] and VALUE_WIDTH
    keys, kv_heads, each,
    k_batch_stride, k_stride, k_head_stride, k_dim_stride, v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (parts of `each` tokens, batch · kv_heads)."""
    batch, head = batch_and_head(tl.program_id(1), kv_heads)
    first = tl.program_id(0) * each
    end = tl.minimum(first + each, keys)
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    k_ptr += batch * k_batch_stride + head * k_head_stride
    sums = tl.zeros([TOKENS, WIDTH], tl.float64)
    for at in range(first, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        sums += load_tile(k_ptr, token, k_stride, k_dim_stride, token < end, DIM, WIDTH).to(tl.float64)
    tl.store(sums_ptr + line * WIDTH + tl.arange(0, WIDTH), tl.sum(sums, 0))
    if tops_ptr is not None:
        v_ptr += batch * v_batch_stride + head * v_head_stride
        tops = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
        for at in range(first, end, TOKENS):
            token = at + tl.arange(0, TOKENS)
            v = load_tile(v_ptr, token, v_stride, v_dim_stride, token < end, VALUE_DIM, VALUE_WIDTH)
            tops = tl.maximum(tops, magnitudes(v.to(tl.float32)))
        tl.store(tops_ptr + line * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH), tl.max(tops, 0))


@triton.jit
def in_order_of_weights(place):
    """The key whose value lies at a place of v_codes; see above."""
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@triton.jit
def codes_kernel(
    k_ptr, v_ptr, sums_ptr, tops_ptr,  # as above
    k_codes_ptr, k_scale_ptr, v_codes_ptr, v_scale_ptr,  # see above, [B, kv_heads, blocks], …, [B, kv_heads, VALUE_WIDTH]
    keys, kv_heads, parts,
    k_batch_stride, k_stride, k_head_stride, k_dim_stride, v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, batch · kv_heads)."""
    batch, head = batch_and_head(tl.program_id(1), kv_heads)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    line = tl.program_id(1).to(tl.int64)
    place, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    there = (part < parts)[:, None]
    channel = tl.arange(0, WIDTH)
    sums = tl.load(sums_ptr + (line * parts + part[:, None]) * WIDTH + channel[None, :], mask=there, other=0.0)
    mean = (tl.sum(sums, 0) / keys).to(tl.float32)
    key = block * BLOCK + place
    k_ptr += batch * k_batch_stride + head * k_head_stride
    k = load_tile(k_ptr, key, k_stride, k_dim_stride, key < keys, DIM, WIDTH).to(tl.float32)
    k = tl.where((key < keys)[:, None], k - mean[None, :], 0.0)
    scale = exact_scale(tl.max(tl.max(magnitudes(k), 1), 0), LARGEST)
    tl.store(k_scale_ptr + line * blocks + block, scale)
    rows = (line * blocks + block) * BLOCK + place
    codes = exact_codes(k, scale, k_codes_ptr.dtype.element_ty)
    tl.store(k_codes_ptr + rows[:, None] * WIDTH + channel[None, :], codes)
    if tops_ptr is not None:
        channel = tl.arange(0, VALUE_WIDTH)
        tops = tl.load(tops_ptr + (line * parts + part[:, None]) * VALUE_WIDTH + channel[None, :], mask=there, other=0)
        v_scale = exact_scale(tl.max(tops, 0), LARGEST_FP8)
        key = block * BLOCK + in_order_of_weights(place)
        v_ptr += batch * v_batch_stride + head * v_head_stride
        v = load_tile(v_ptr, key, v_stride, v_dim_stride, key < keys, VALUE_DIM, VALUE_WIDTH).to(tl.float32)
        codes = exact_codes(v, v_scale[None, :], v_codes_ptr.dtype.element_ty)
        lines = (line * VALUE_WIDTH + channel) * blocks * BLOCK
        tl.store(v_codes_ptr + lines[None, :] + (block * BLOCK + place)[:, None], codes)
        if block == 0:
            tl.store(v_scale_ptr + line * VALUE_WIDTH + channel, v_scale)


@triton.jit
def load_values(ptr, key, stride, dim_stride, keys, MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Values of some keys, all of which there are unless MASKED."""
    if MASKED or DIM != WIDTH:
        return load_tile(ptr, key, stride, dim_stride, key < keys, DIM, WIDTH)
    else:
        return tl.load(ptr + key.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :] * dim_stride)


@triton.jit
def add_keys(
    values, total, largest, low, high, q, factor, query, start, end, offset, keys,
    k_codes_ptr, k_scale_ptr, v_ptr, v_stride, v_dim_stride,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, FP8_VALUES: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """(values, total, largest) with the keys from low to high; pointers are those of a head."""
    ROWS: tl.constexpr = q.shape[0]
    INTEGERS: tl.constexpr = q.dtype == tl.int8
    channel = tl.arange(0, WIDTH)
    value_channel = tl.arange(0, VALUE_WIDTH)
    for first_key in range(low, high, KEYS):
        key = first_key + tl.arange(0, KEYS)
        k = tl.load(k_codes_ptr + key[:, None] * WIDTH + channel[None, :])
        unit = factor * tl.load(k_scale_ptr + first_key // BLOCK)
        sums = tl.dot(q, tl.trans(k), out_dtype=tl.int32 if INTEGERS else tl.float32).to(tl.float32)
        if MASKED:
            seen = (key < keys)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= (query + offset)[:, None])
            if DOCUMENTS:
                seen = seen & (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            scores = tl.where(seen, sums * unit[:, None], float("-inf"))
            top = tl.maximum(largest, tl.ceil(tl.max(scores, 1)))
            at = finite_or_zero(top)  # a row may see none of these keys, nor any before
            weights = tl.exp2(scores - (at - (LOG2_TOP if FP8_VALUES else 0.0))[:, None])
        else:
            top = tl.maximum(largest, tl.ceil(tl.max(sums, 1) * unit))
            at = finite_or_zero(top)
            weights = tl.exp2(sums * unit[:, None] - (at - (LOG2_TOP if FP8_VALUES else 0.0))[:, None])
        fade = tl.exp2(largest - at)
        total = total * fade + tl.sum(weights, 1)
        if FP8_VALUES:
            v = tl.load(v_ptr + value_channel[:, None] * v_dim_stride + key[None, :])
            # In the order in which v_codes lie.
            by_four = tl.permute(tl.reshape(weights, [ROWS, KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
            in_8_bits = tl.reshape(by_four, [ROWS, KEYS]).to(v.dtype)
            values = values * fade[:, None] + tl.dot(in_8_bits, tl.trans(v), out_dtype=tl.float32)
        else:
            v = load_values(v_ptr, key, v_stride, v_dim_stride, keys, MASKED, VALUE_DIM, VALUE_WIDTH)
            values = tl.dot(weights.to(v.dtype), v, values * fade[:, None], out_dtype=tl.float32)
        largest = top
    return values, total, largest


@triton.jit
def codes_fwd_kernel(
    q_ptr, k_codes_ptr, k_scale_ptr, v_ptr, v_scale_ptr, bounds_ptr, out_ptr,  # [B, S, heads, …], see above, [B, S, 2], as q
    queries, keys, heads, blocks,
    q_batch_stride, q_stride, q_head_stride, q_dim_stride, v_batch_stride, v_stride, v_head_stride, v_dim_stride,
    FACTOR: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, batch · heads); the last queries, which see most, come first."""
    DOCUMENTS: tl.constexpr = bounds_ptr is not None
    FP8_VALUES: tl.constexpr = v_scale_ptr is not None
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = batch_and_head(tl.program_id(1), heads)
    kv_head, offset = head // GROUP, keys - queries
    line = batch * (heads // GROUP) + kv_head
    query = first_query + tl.arange(0, ROWS)
    inside = query < queries
    start, end = query, query
    if DOCUMENTS:
        start, end = document_of(bounds_ptr, batch * queries + query, inside)
    low, high = keys_seen_by(first_query, start, end, offset, queries, keys, CAUSAL, None, DOCUMENTS, ROWS, KEYS)
    all_from, all_to = low, high
    if CAUSAL:
        all_to = tl.minimum(all_to, first_query + offset + 1)
    if DOCUMENTS:
        all_from = tl.max(tl.where(inside, start, 0), 0)
        all_to = tl.minimum(all_to, tl.min(tl.where(inside, end, keys), 0))
    all_from = tl.cdiv(all_from, KEYS) * KEYS
    all_to = tl.maximum(all_to // KEYS * KEYS, all_from)

    q = load_tile(
        q_ptr + batch * q_batch_stride + head * q_head_stride, query, q_stride, q_dim_stride, inside, DIM, WIDTH
    )
    q = q.to(tl.float32)
    q_scale = exact_scale(tl.max(magnitudes(q), 1), LARGEST)
    codes = exact_codes(q, q_scale[:, None], k_codes_ptr.dtype.element_ty)
    factor = q_scale * FACTOR
    k_codes_ptr += line * blocks * BLOCK * WIDTH
    k_scale_ptr += line * blocks
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    if DOCUMENTS:
        values, total, largest = add_keys(
            values, total, largest, low, tl.minimum(all_from, high), codes, factor, query, start, end, offset, keys,
            k_codes_ptr, k_scale_ptr, v_ptr, v_stride, v_dim_stride,
            True, CAUSAL, DOCUMENTS, FP8_VALUES, BLOCK, KEYS, WIDTH, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
    values, total, largest = add_keys(
        values, total, largest, all_from, all_to, codes, factor, query, start, end, offset, keys,
        k_codes_ptr, k_scale_ptr, v_ptr, v_stride, v_dim_stride,
        False, CAUSAL, DOCUMENTS, FP8_VALUES, BLOCK, KEYS, WIDTH, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    values, total, largest = add_keys(
        values, total, largest, all_to, high, codes, factor, query, start, end, offset, keys,
        k_codes_ptr, k_scale_ptr, v_ptr, v_stride, v_dim_stride,
        True, CAUSAL, DOCUMENTS, FP8_VALUES, BLOCK, KEYS, WIDTH, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    values = values / tl.where(total == 0, 1.0, total)[:, None]  # a query may see no key, and gets zeros
    if FP8_VALUES:
        values *= tl.load(v_scale_ptr + line * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH))[None, :]
    out_ptr += (batch * queries * heads + head) * VALUE_DIM
    store_tile(out_ptr, query, heads * VALUE_DIM, values, inside, VALUE_DIM, VALUE_WIDTH)


class CodedKeys(NamedTuple):
    """Codes and scales of keys, and of values where these have some; how they lie is at the head of this file."""

    k: Tensor
    k_scale: Tensor
    v: Tensor | None
    v_scale: Tensor | None


def code_width(dim: int) -> int:
    return max(next_power(dim), LEAST_WIDTH)


def coded_keys(k: Tensor, v: Tensor, codes: torch.dtype, values: str) -> CodedKeys:
    """Keys less their mean as codes, and values with `values="fp8"`."""
    (batch, keys, kv_heads, dim), value_dim = k.shape, v.shape[3]
    width, value_width, blocks = code_width(dim), width_of(value_dim), cdiv(keys, BLOCK)
    heads, device, in_fp8 = (batch, kv_heads), k.device, values == "fp8"
    each = max(cdiv(cdiv(keys, MOST_PARTS), TOKENS), 4) * TOKENS
    parts = cdiv(keys, each)
    new = lambda *shape, dtype: torch.empty((*heads, *shape), dtype=dtype, device=device)
    sums = new(parts, width, dtype=torch.float64)
    made = CodedKeys(new(blocks * BLOCK, width, dtype=codes), new(blocks, dtype=torch.float32), None, None)
    tops = None
    if in_fp8:
        tops = new(parts, value_width, dtype=torch.float32)
        v_codes = new(value_width, blocks * BLOCK, dtype=torch.float8_e4m3fn)
        made = made._replace(v=v_codes, v_scale=new(value_width, dtype=torch.float32))
    lie = *k.stride(), *v.stride()
    sizes = dict(DIM=dim, WIDTH=width, VALUE_DIM=value_dim, VALUE_WIDTH=value_width)
    launch(
        part_sums_kernel, (parts, batch * kv_heads), k, v if in_fp8 else None, sums, tops, keys, kv_heads, each, *lie,
        **sizes, TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
    launch(
        codes_kernel, (blocks, batch * kv_heads), k, v if in_fp8 else None, sums, tops, *made, keys, kv_heads, parts, *lie,
        **sizes, PARTS=next_power(parts), BLOCK=BLOCK, LARGEST=LARGEST_CODE[codes], num_warps=8,
    )  # fmt: skip
    return made


class Tile(NamedTuple):
    """Queries and keys of a tile, and who works on it."""

    rows: int
    keys: int
    warps: int
    stages: int


CONFIGS = {
    "64 by 128": Tile(64, 128, 4, 2),
    "64 by 64": Tile(64, 64, 4, 3),
}


def tile_for(config: Tile, width: int, documents: bool, device: torch.device) -> Tile:
    """The tile of a configuration, smaller where registers have no room for it: where heads are wide, beside the bounds of
    documents, and before Hopper, whose tensor cores take operands from shared memory."""
    if width > 128:
        return Tile(64, 64, 8, 2)
    crowded = documents or shared_memory(device) < HOPPER_SHARED
    return Tile(config.rows, 64, config.warps, 2) if crowded else config


def attention_of_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    codes: torch.dtype,
    values: str,
    tile: Tile,
) -> Tensor:
    (batch, queries, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    coded = coded_keys(k, v, codes, values)
    v = v if coded.v is None else coded.v.permute(0, 3, 1, 2)
    tile = tile_for(tile, max(code_width(dim), width_of(value_dim)), cu_seqlens is not None, q.device)
    rows = tile_length(queries, tile.rows)
    launch(
        codes_fwd_kernel, (cdiv(queries, rows), batch * heads),
        q, coded.k, coded.k_scale, v, coded.v_scale, document_bounds(cu_seqlens, batch, queries), out,
        queries, keys, heads, coded.k_scale.shape[2], *q.stride(), *v.stride(),
        FACTOR=scale_or_usual(scale, q) * LOG2_E.value, CAUSAL=causal, GROUP=heads // kv_heads, LARGEST=LARGEST_CODE[codes],
        BLOCK=BLOCK, ROWS=rows, KEYS=tile.keys,
        DIM=dim, WIDTH=code_width(dim), VALUE_DIM=value_dim, VALUE_WIDTH=width_of(value_dim),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def takes_int8(q: Tensor, v: Tensor, values: str) -> bool | str:
    if q.shape[0] * q.shape[2] > MOST_HEADS:
        return f"a grid has room for {MOST_HEADS:,} heads of a batch, not for {q.shape[0]:,} · {q.shape[2]}"
    if max(q.shape[3], v.shape[3]) > WIDEST_HEAD:
        return f"its heads have up to {WIDEST_HEAD} dimensions"
    return reads_fp8(q) if values == "fp8" else True


def takes_fp8(q: Tensor, v: Tensor) -> bool | str:
    return takes_int8(q, v, "fp8")


@implements(ops.attention_int8, backend="triton", repeat=straight_line, dtypes=HALVES, when=takes_int8, configs=CONFIGS)
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    values: str,
    *,
    config: Tile,
) -> Tensor:
    return attention_of_codes(q, k, v, cu_seqlens, causal, scale, torch.int8, values, config)


@implements(ops.attention_fp8, backend="triton", repeat=straight_line, dtypes=HALVES, when=takes_fp8, configs=CONFIGS)
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float | None, *, config: Tile
) -> Tensor:
    return attention_of_codes(q, k, v, cu_seqlens, causal, scale, torch.float8_e4m3fn, "fp8", config)
