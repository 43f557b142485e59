"""Attention of codes on Hopper, as the backend `gluon` for heads of 64 and 128: attention_forward.py with 8 bits in its products.

    producer      1 warp    queries as they are, then codes of the keys and values that they see, by TMA
    consumers     4 warps   codes of 64 queries, once, into shared memory; S = codes · codesᵀ by WGMMA in int32, exact, or of
                  each      e4m3 in float32; the online softmax in registers; O += P V

What codes are, how they lie and who makes those of keys and values is in attention/quantised.py. A tile has the keys of one
scale. P and V are halves or e4m3. Products of int8 take half the time of bfloat16's, those of e4m3 too, while exponentials take
what they did: it is these that should never wait, so that consumers may take turns at the tensor cores.

Of e4m3, tensor cores add up with few bits: the values of a tile are a sum of their own, which joins the others outside.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.before_keys import before_first_key, behind_zeros
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.attention.quantised import HALVES, MOST_HEADS, coded_keys
from tilestack.kernels.hopper.attention_forward import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    first_tiles,
    hidden,
    rows_of_tile,
    tiles_seen,
)
from tilestack.kernels.hopper.attention_tiles import as_tma_reads, tiles_of
from tilestack.kernels.hopper.matmul import next_in_ring, tile_of
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.ops import quantised, quantised_attention
from tilestack.ops.attention import scale_or_usual
from tilestack.ops.quantised_attention import BLOCK

DIMS = (64, 128)
LOG2_E = 1.4426950408889634
LOG2_TOP = gl.constexpr(float(quantised_attention.LOG2_TOP))
SMALLEST_ROW = gl.constexpr(quantised.SMALLEST_ROW)
NO_FRACTION = gl.constexpr(12582912.0)  # added and taken off, it leaves no bits below the point


@gluon.jit
def load_codes(
    q_desc, k_desc, v_desc, bounds_ptr, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    batch, queries, keys, heads, tiles,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, FP8_VALUES: gl.constexpr,
):  # fmt: skip
    """The producer: all that the consumers of this program will read, as room becomes free."""
    CONSUMERS: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    q_phase = 1
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, _ = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, _ = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        kv_head = head // GROUP
        mbarrier.wait(q_free, q_phase)
        mbarrier.expect(q_full, CONSUMERS * q_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            at = [row, head, first_query + consumer * ROWS, 0]
            tma.async_copy_global_to_shared(q_desc, at, q_full, q_s.index(consumer))
        q_phase ^= 1
        for step in range(seen - unseen):
            first_key = (seen - 1 - step) * KEYS
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            at = [row, kv_head, first_key, 0]
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_s.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            if FP8_VALUES:
                at = [row, kv_head, 0, first_key]
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def code_queries(raw, codes, LARGEST: gl.constexpr, LAYOUT: gl.constexpr):
    """Store the codes of some queries and answer their scales, by the arithmetic of ops.quantised."""
    q = raw.load(LAYOUT).to(gl.float32)
    largest = gl.max(gl.where(q == q, gl.abs(q), float("inf")), 1)
    scale = gl.div_rn(gl.maximum(largest, SMALLEST_ROW), gl.zeros_like(largest) + LARGEST)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    q = gl.div_rn(q, gl.zeros_like(q) + scale[:, None])
    if codes.dtype == gl.int8:
        q = (gl.where(q == q, q, 0.0) + NO_FRACTION) - NO_FRACTION
    codes.store(q.to(codes.dtype))
    fence_async_shared()
    return scale


@gluon.jit
def numbers_and_top(
    s, unit, largest, first_key, query, start, queries, keys,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """(sums of codes as numbers, those that are MASKED already times their unit, the top so far): tops are whole."""
    s = s.to(gl.float32)
    if MASKED:
        s = hidden(s * unit[:, None], first_key, query, start, queries, keys, CAUSAL, SCORES)
        return s, gl.maximum(largest, gl.ceil(gl.max(s, 1)))
    else:
        return s, gl.maximum(largest, gl.ceil(gl.max(s, 1) * unit))


@gluon.jit
def weights_below(s, unit, top, largest, MASKED: gl.constexpr, LIFT: gl.constexpr):
    """(weights of a tile, 2^(score - top + LIFT), and how what was before fades)."""
    if MASKED:
        top = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        return gl.exp2(s - (top - LIFT)[:, None]), gl.exp2(largest - top)
    else:
        return gl.exp2(s * unit[:, None] - (top - LIFT)[:, None]), gl.exp2(largest - top)


@gluon.jit
def keep_weights(p, fade, weights_s, FP8_VALUES: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """Weights for the product with their values, which comes under the next tile's softmax: halves in registers, as WGMMA takes
    a left operand from there. Those of 8 bits go through shared memory, in the order of v_codes, and what is kept is how the
    total fades with them; in registers, bytes would be packed and unpacked at every step."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    if FP8_VALUES:
        p = gl.reshape(gl.permute(gl.reshape(p, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [ROWS, KEYS])
        weights_s.store(p.to(DTYPE))
        fence_async_shared()
        return fade
    else:
        return gl.convert_layout(p.to(DTYPE), LEFT)


@gluon.jit
def add_values(total, kept, weights_s, v, FP8_VALUES: gl.constexpr):
    """The product of a tile's weights and values, under way: on top of the total, or where that has few bits by itself."""
    if FP8_VALUES:
        return warpgroup_mma(weights_s, v, gl.zeros_like(total), use_acc=False, is_async=True)
    else:
        return warpgroup_mma(kept, v, total, is_async=True)


@gluon.jit
def values_in(v_s, slot, FP8_VALUES: gl.constexpr):
    """The values of a slot, [keys, dim]."""
    SIDES: gl.constexpr = [v_s.shape[3], v_s.shape[4]]
    if FP8_VALUES:
        return v_s.index(slot).reshape(SIDES).permute((1, 0))
    else:
        return v_s.index(slot).reshape(SIDES)


@gluon.jit
def joined(total, fade, part, free):
    """The total with the values of a tile, whose slot is free then."""
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(free, count=1)
    return total * fade[:, None] + part


@gluon.jit
def add_coded_keys(
    total, kept, largest, sums, slot, phase, turn_phase, tile, query, start,
    factor, scale_ptr, q, weights_s, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, ME: gl.constexpr, CONSUMERS: gl.constexpr,
    FP8_VALUES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Make the sums of the tile of keys after the slot, add the slot's values, then make weights of those sums."""
    ROWS: gl.constexpr = q.shape[0]
    DIM: gl.constexpr = q.shape[1]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    NUMBERS: gl.constexpr = gl.int32 if q.dtype == gl.int8 else gl.float32
    unit = factor * gl.load(scale_ptr + tile)
    coming, its_phase = next_in_ring(slot, phase, SLOTS)
    mbarrier.wait(k_full.index(coming), its_phase)
    if PING_PONG:
        mbarrier.wait(turns.index(ME), turn_phase)
    k = k_s.index(coming).reshape([KEYS, DIM]).permute((1, 0))
    s = warpgroup_mma(q, k, gl.zeros((ROWS, KEYS), NUMBERS, SCORES), use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), phase)
    part = add_values(total, kept, weights_s, values_in(v_s, slot, FP8_VALUES), FP8_VALUES)
    if PING_PONG:
        mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_free.index(coming), count=1)
    # Two sums of values would not fit into registers beside all weights, nor beside a mask.
    if FP8_VALUES and MASKED:
        total = joined(total, kept, part, v_free.index(slot))
    s, top = numbers_and_top(s, unit, largest, tile * KEYS, query, start, queries, keys, MASKED, CAUSAL, SCORES)
    if FP8_VALUES and not MASKED:
        total = joined(total, kept, part, v_free.index(slot))
    p, its_fade = weights_below(s, unit, top, largest, MASKED, LOG2_TOP if FP8_VALUES else 0.0)
    sums = sums * its_fade + gl.sum(p, 1)
    fade = gl.convert_layout(its_fade, gl.SliceLayout(1, SUMS))
    if not FP8_VALUES:
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(v_free.index(slot), count=1)
        total = part * fade[:, None]
    kept = keep_weights(p, fade, weights_s, FP8_VALUES, v_s.dtype, LEFT)
    return total, kept, top, sums, coming, its_phase, turn_phase ^ 1


@gluon.jit
def attend_codes(
    out_desc, k_scale_ptr, v_scale_ptr, bounds_ptr, q_s, codes_s, weights_s, k_s, v_s, out_s,
    q_full, q_free, k_full, k_free, v_full, v_free, turns, batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr, LARGEST: gl.constexpr,
    FP8_VALUES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: ROWS queries of each of this program's tiles."""
    CONSUMERS: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    DIM: gl.constexpr = q_s.shape[4]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    DEPTH: gl.constexpr = 32 if FP8_VALUES else 16  # keys that an instruction takes of weights and values
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, DEPTH])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=DEPTH // 8)
    NUMBERS: gl.constexpr = gl.int32 if codes_s.dtype == gl.int8 else gl.float32
    LIFT: gl.constexpr = LOG2_TOP if FP8_VALUES else 0.0
    q, weights_s = codes_s.index(ME), weights_s.index(ME)
    blocks = gl.cdiv(keys, KEYS)
    slot = SLOTS - 1  # what comes first lies in the slot after it
    phase = 1
    q_phase = 0
    turn_phase = 1 if ME == 0 else 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, whole = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, begun = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        line = (row * (heads // GROUP) + head // GROUP).to(gl.int64)
        scale_ptr = k_scale_ptr + line * blocks
        first_query += ME * ROWS
        query = first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        start = None
        if bounds_ptr is not None:
            start = gl.load(bounds_ptr + 2 * (row.to(gl.int64) * queries + query), mask=query < queries, other=0)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        q_scale = code_queries(q_s.index(ME).reshape([ROWS, DIM]), q, LARGEST, SUMS)
        mbarrier.arrive(q_free, count=1)
        factor = gl.convert_layout(q_scale, gl.SliceLayout(1, SCORES)) * scale
        slot, phase = next_in_ring(slot, phase, SLOTS)
        unit = factor * gl.load(scale_ptr + seen - 1)
        mbarrier.wait(k_full.index(slot), phase)
        k = k_s.index(slot).reshape([KEYS, DIM]).permute((1, 0))
        s = warpgroup_mma(q, k, gl.zeros((ROWS, KEYS), NUMBERS, SCORES), use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(slot), count=1)
        nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        s, largest = numbers_and_top(
            s, unit, nothing, (seen - 1) * KEYS, query, start, queries, keys, True, CAUSAL, SCORES
        )
        p, fade = weights_below(s, unit, largest, nothing, True, LIFT)
        sums = gl.sum(p, 1)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, SUMS))
        kept = keep_weights(p, fade, weights_s, FP8_VALUES, v_s.dtype, LEFT)
        total = gl.zeros((ROWS, DIM), gl.float32, SUMS)
        cut_from, left = whole, gl.minimum(whole, seen - 1)
        if bounds_ptr is not None:
            cut_from, begun = gl.maximum(whole, unseen), gl.minimum(begun, left)
        if CAUSAL:  # more than one tile may be cut
            for block in range(1, seen - cut_from):
                total, kept, largest, sums, slot, phase, turn_phase = add_coded_keys(
                    total, kept, largest, sums, slot, phase, turn_phase, seen - 1 - block, query, start,
                    factor, scale_ptr, q, weights_s, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys,
                    True, CAUSAL, PING_PONG, ME, CONSUMERS, FP8_VALUES, SCORES, SUMS, LEFT,
                )  # fmt: skip
        for block in range(left - begun):
            total, kept, largest, sums, slot, phase, turn_phase = add_coded_keys(
                total, kept, largest, sums, slot, phase, turn_phase, left - 1 - block, query, start,
                factor, scale_ptr, q, weights_s, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys,
                False, CAUSAL, PING_PONG, ME, CONSUMERS, FP8_VALUES, SCORES, SUMS, LEFT,
            )  # fmt: skip
        if bounds_ptr is not None:
            for block in range(begun - unseen):
                total, kept, largest, sums, slot, phase, turn_phase = add_coded_keys(
                    total, kept, largest, sums, slot, phase, turn_phase, begun - 1 - block, query, start,
                    factor, scale_ptr, q, weights_s, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys,
                    True, CAUSAL, PING_PONG, ME, CONSUMERS, FP8_VALUES, SCORES, SUMS, LEFT,
                )  # fmt: skip
        mbarrier.wait(v_full.index(slot), phase)
        part = add_values(total, kept, weights_s, values_in(v_s, slot, FP8_VALUES), FP8_VALUES)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(v_free.index(slot), count=1)
        if FP8_VALUES:
            channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
            v_scale = gl.load(v_scale_ptr + line * DIM + channel)
            total = (total * kept[:, None] + part) * v_scale[None, :]
        else:
            total = part
        total = total * gl.convert_layout(1 / sums, gl.SliceLayout(1, SUMS))[:, None]
        tma.store_wait(pendings=0)  # the last tile's has been read
        out_s.index(ME).reshape([ROWS, DIM]).store(total.to(out_s.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, first_query, head * DIM], out_s.index(ME))
    tma.store_wait(pendings=0)


@gluon.jit
def attention_codes_kernel(
    q_desc, k_desc, v_desc, out_desc,  # [B, heads, S, DIM], [B, kv_heads, …] twice, [B, S, heads · DIM]
    k_scale_ptr, v_scale_ptr, bounds_ptr,  # [B, kv_heads, …] twice, [B, S, 2]
    batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr, LARGEST: gl.constexpr,
    SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    FP8_VALUES: gl.constexpr = v_scale_ptr is not None
    CONSUMERS: gl.constexpr = 2
    TILE: gl.constexpr = q_desc.block_type.shape
    KEYS: gl.constexpr = k_desc.block_type.shape
    VALUES: gl.constexpr = v_desc.block_type.shape
    CODES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE[2], TILE[3]], k_desc.dtype)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + TILE, q_desc.layout)
    codes_s = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, TILE[2], TILE[3]], CODES)
    weights_s = codes_s  # not used where weights stay in registers
    if FP8_VALUES:
        WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE[2], KEYS[2]], v_desc.dtype)
        weights_s = gl.allocate_shared_memory(v_desc.dtype, [CONSUMERS, TILE[2], KEYS[2]], WEIGHTS)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [SLOTS] + KEYS, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [SLOTS] + VALUES, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=CONSUMERS)
        mbarrier.init(v_free.index(slot), count=CONSUMERS)
    gl.warp_specialize(
        [
            (attend_codes, (
                out_desc, k_scale_ptr, v_scale_ptr, bounds_ptr, q_s, codes_s, weights_s, k_s, v_s, out_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, batch, queries, keys, heads, tiles, scale,
                GROUP, CAUSAL, PING_PONG, AT_A_TIME, LARGEST, FP8_VALUES, 0,
            )),
            (attend_codes, (
                out_desc, k_scale_ptr, v_scale_ptr, bounds_ptr, q_s, codes_s, weights_s, k_s, v_s, out_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, batch, queries, keys, heads, tiles, scale,
                GROUP, CAUSAL, PING_PONG, AT_A_TIME, LARGEST, FP8_VALUES, 1,
            )),
            (load_codes, (
                q_desc, k_desc, v_desc, bounds_ptr, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                batch, queries, keys, heads, tiles, GROUP, CAUSAL, AT_A_TIME, FP8_VALUES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class Config(NamedTuple):
    """Whether consumers take turns; tiles of keys in flight; and how many heads share the L2."""

    ping_pong: bool
    slots: int = 2
    heads_at_a_time: int = 16


CONFIGS = {"in turns": Config(ping_pong=True), "free": Config(ping_pong=False)}


def attention_of_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    codes: torch.dtype,
    values: str,
    config: Config,
) -> Tensor:
    if first := before_first_key(q, k, causal):
        seeing = attention_of_codes(q[:, first:], k, v, cu_seqlens, causal, scale, codes, values, config)
        return behind_zeros(seeing, first)
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    coded = coded_keys(k, v, codes, values)
    k_tiles = tile_of(coded.k, (1, 1, BLOCK, dim))
    v_tiles = tiles_of(as_tma_reads(v), BLOCK) if coded.v is None else tile_of(coded.v, (1, 1, dim, BLOCK))
    q = as_tma_reads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_tiles = tile_of(out.flatten(2), (1, ROWS, dim))  # a coordinate less to keep in registers, where some spill
    tiles = batch * heads * cdiv(queries, CONSUMERS * ROWS)
    programs = min(multiprocessors(q.device), tiles)
    launch(
        attention_codes_kernel, (programs,),
        tiles_of(q, ROWS), k_tiles, v_tiles, out_tiles, coded.k_scale, coded.v_scale,
        document_bounds(cu_seqlens, batch, queries),
        batch, queries, keys, heads, tiles, scale_or_usual(scale, q) * LOG2_E,
        GROUP=heads // kv_heads, CAUSAL=causal, PING_PONG=config.ping_pong, AT_A_TIME=config.heads_at_a_time,
        LARGEST=quantised.LARGEST_CODE[codes], SLOTS=config.slots,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out


def takes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool) -> bool | str:
    if q.shape[3] not in DIMS or v.shape[3] != q.shape[3]:
        return f"its heads have {' or '.join(map(str, DIMS))} dimensions, those of values as many"
    if q.shape[1] < min(ROWS, k.shape[1]):
        return f"it has {ROWS} queries at a time, and few of them at the end of more keys are for a kernel that splits keys"
    if cu_seqlens is not None and not causal:
        return "it has no documents that are not causal"
    if k.shape[0] * k.shape[2] > MOST_HEADS:
        return f"a grid has room for {MOST_HEADS:,} heads of keys, not for {k.shape[0]:,} · {k.shape[2]}"
    return q.numel() > 0 or "it needs at least one query"


@implements(ops.attention_int8, backend="gluon", repeat=straight_line, dtypes=HALVES, when=takes, configs=CONFIGS)
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    values: str,
    *,
    config: Config,
) -> Tensor:
    return attention_of_codes(q, k, v, cu_seqlens, causal, scale, torch.int8, values, config)


@implements(ops.attention_fp8, backend="gluon", repeat=straight_line, dtypes=HALVES, when=takes, configs=CONFIGS)
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float | None, *, config: Config
) -> Tensor:
    return attention_of_codes(q, k, v, cu_seqlens, causal, scale, torch.float8_e4m3fn, "fp8", config)
