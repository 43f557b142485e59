"""The forward of attention on Hopper: one warp that only loads, and two or three groups of four that own 64 queries each.

    producer      1 warp    Q of a tile of queries, then the keys and values that it sees, into a ring of slots, by TMA
    consumer 0    4 warps   queries  0 …  63: S = Q Kᵀ by WGMMA, the online softmax in registers, O += P V
    consumer 1    4 warps   queries 64 … 127: the same, from the same slots

                   ← keys, from the last that is seen to the first
          +------+------+------+------+
    Q 0   |      |      |      | mask |      A row's last keys come first. Those are the tiles that a diagonal or the end
          +------+------+------+------+      of the keys cuts; all that follow are seen whole, in a loop without a mask.
    Q 1   |      |      |      | mask |
          +------+------+------+------+

Packed documents hide the keys before a query's own. Documents stand in order, so that what a tile's first query sees begins
no later than what its last sees: tiles of keys between the two beginnings are masked again, and those before are left out.

The product of the next scores is queued before P V of the last, so that the softmax runs under a product. A head of 64
has as many exponentials to make as tensor cores need time: with PING_PONG the consumers take turns at the tensor cores, so
that one's softmax lies under another's products.

Programs walk over tiles, longest rows first where there is a diagonal, some heads at a time, which share the L2. With as
many programs as multiprocessors the next tile's Q, keys and values come in under the end of this one; with as many as
tiles, the GPU hands them out as programs end. For the backward each row leaves the logarithm of its sum.
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

from tilestack.contract.launch import launch
from tilestack.kernels.hopper.attention_tiles import by_rows, place_in_bands, tiles_of
from tilestack.kernels.hopper.matmul import next_in_ring
from tilestack.kernels.tiles import cdiv, multiprocessors

ROWS = 64  # queries of a consumer, what four warps multiply at a time
PRODUCER_REGISTERS = 24  # of a thread
CONSUMER_REGISTERS = {2: 240, 3: 160}  # by their number; the first gets what is left, as much or a little more
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


class Forward(NamedTuple):
    """How many consumers, keys of a tile and tiles of keys in flight; whether consumers take turns; and whether there are
    as many programs as multiprocessors, or as tiles."""

    consumers: int = 2
    keys: int = 128
    slots: int = 2
    ping_pong: bool = False
    persistent: bool = False
    heads_at_a_time: int = 16


@gluon.jit
def rows_of_tile(number, queries, heads, batch, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr):
    """(batch, head, first query) of a tile; where there is a diagonal, the last queries first, which see most."""
    blocks = gl.cdiv(queries, BLOCK)
    head, block = place_in_bands(number, batch * heads, blocks, AT_A_TIME)
    if CAUSAL:
        block = blocks - 1 - block
    return head // heads, head % heads, block * BLOCK


@gluon.jit
def tiles_seen(first_query, queries, keys, BLOCK: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Of a tile of queries: how many tiles of keys any of them sees, and how many of these, the first, all see whole."""
    if CAUSAL:
        sees = first_query + keys - queries + 1  # keys that the first query sees
        return gl.cdiv(gl.minimum(sees + BLOCK - 1, keys), KEYS), sees // KEYS
    else:
        return gl.cdiv(keys, KEYS), keys // KEYS


@gluon.jit
def first_tiles(bounds_ptr, row, first_query, queries, BLOCK: gl.constexpr, KEYS: gl.constexpr):
    """Of a tile of queries: the first tile of keys that any of them sees by its document, and the first that all do."""
    if bounds_ptr is None:
        return 0, 0
    else:
        at = row.to(gl.int64) * queries
        last_query = gl.minimum(first_query + BLOCK, queries) - 1
        earliest = gl.load(bounds_ptr + 2 * (at + first_query))
        latest = gl.load(bounds_ptr + 2 * (at + last_query))
        return earliest // KEYS, gl.cdiv(latest, KEYS)


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, bounds_ptr, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    batch, queries, keys, heads, tiles,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr,
):  # fmt: skip
    """The producer: all that the consumers of this program will read, as room becomes free."""
    CONSUMERS: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[2]
    DIM: gl.constexpr = q_s.shape[3]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[2]
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    q_phase = 1
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, _ = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, _ = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        mbarrier.wait(q_free, q_phase)
        mbarrier.expect(q_full, CONSUMERS * q_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            at = [row, first_query + consumer * ROWS, head * DIM]
            tma.async_copy_global_to_shared(q_desc, at, q_full, q_s.index(consumer))
        q_phase ^= 1
        for step in range(seen - unseen):
            at = [row, (seen - 1 - step) * KEYS, head // GROUP * DIM]
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_s.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def hidden(s, first_key, query, start, queries, keys, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores, -inf where a query does not see a key or there is none; a query's document begins at `start`, if it has one."""
    KEYS: gl.constexpr = s.shape[1]
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    seen = (key < keys)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= (query + keys - queries)[:, None])
    if start is not None:
        seen = seen & (key[None, :] >= start[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weights_of(s, largest, scale):
    """(2^(scale s - top), top, 2^(largest - top)): a row's weights so far, its top so far, and how what was before fades."""
    top = gl.maximum(largest, gl.max(s, 1) * scale)
    finite = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    return gl.exp2(s * scale - finite[:, None]), top, gl.exp2(largest - finite)


@gluon.jit
def add_keys(
    total, weights, largest, sums, slot, phase, turn_phase, first_key, query, start,
    q, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, ME: gl.constexpr, CONSUMERS: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Make the scores of the tile of keys after the slot, add the slot's values, then make weights of those scores."""
    ROWS: gl.constexpr = q.shape[0]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[2]
    DIM: gl.constexpr = k_s.shape[3]
    coming, its_phase = next_in_ring(slot, phase, SLOTS)
    mbarrier.wait(k_full.index(coming), its_phase)
    if PING_PONG:
        mbarrier.wait(turns.index(ME), turn_phase)
    nothing = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    k = k_s.index(coming).reshape([KEYS, DIM]).permute((1, 0))
    s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), phase)
    total = warpgroup_mma(weights, v_s.index(slot).reshape([KEYS, DIM]), total, is_async=True)
    if PING_PONG:
        mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_free.index(coming), count=1)
    if MASKED:
        s = hidden(s, first_key, query, start, queries, keys, CAUSAL, SCORES)
    p, largest, fade = weights_of(s, largest, scale)
    sums = sums * fade + gl.sum(p, 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(v_free.index(slot), count=1)
    total = total * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    weights = gl.convert_layout(p.to(q.dtype), LEFT)
    return total, weights, largest, sums, coming, its_phase, turn_phase ^ 1


@gluon.jit
def attend_rows(
    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
    batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: ROWS queries of each of this program's tiles."""
    CONSUMERS: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[2]
    DIM: gl.constexpr = q_s.shape[3]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    scale = scale * LOG2_E
    q = q_s.index(ME).reshape([ROWS, DIM])
    slot = SLOTS - 1  # what comes first lies in the slot after it
    phase = 1
    q_phase = 0
    turn_phase = 1 if ME == 0 else 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, whole = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, begun = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        first_query += ME * ROWS
        query = first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        start = None
        if bounds_ptr is not None:
            start = gl.load(bounds_ptr + 2 * (row.to(gl.int64) * queries + query), mask=query < queries, other=0)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        slot, phase = next_in_ring(slot, phase, SLOTS)
        mbarrier.wait(k_full.index(slot), phase)
        nothing = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
        k = k_s.index(slot).reshape([KEYS, DIM]).permute((1, 0))
        s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(slot), count=1)
        s = hidden(s, (seen - 1) * KEYS, query, start, queries, keys, CAUSAL, SCORES)
        p, largest, _ = weights_of(s, gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES)), scale)
        sums = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(q.dtype), LEFT)
        total = gl.zeros((ROWS, DIM), gl.float32, SUMS)
        cut_from, left = whole, gl.minimum(whole, seen - 1)
        if bounds_ptr is not None:
            cut_from, begun = gl.maximum(whole, unseen), gl.minimum(begun, left)
            left -= begun
        if CAUSAL:  # more than one tile may be cut
            for block in range(1, seen - cut_from):
                total, weights, largest, sums, slot, phase, turn_phase = add_keys(
                    total, weights, largest, sums, slot, phase, turn_phase, (seen - 1 - block) * KEYS, query, start,
                    q, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys, scale,
                    True, CAUSAL, PING_PONG, ME, CONSUMERS, SCORES, SUMS, LEFT,
                )  # fmt: skip
        for _ in range(left):
            total, weights, largest, sums, slot, phase, turn_phase = add_keys(
                total, weights, largest, sums, slot, phase, turn_phase, 0, query, start,
                q, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys, scale,
                False, CAUSAL, PING_PONG, ME, CONSUMERS, SCORES, SUMS, LEFT,
            )  # fmt: skip
        if bounds_ptr is not None:
            for block in range(begun - unseen):
                total, weights, largest, sums, slot, phase, turn_phase = add_keys(
                    total, weights, largest, sums, slot, phase, turn_phase, (begun - 1 - block) * KEYS, query, start,
                    q, k_s, v_s, k_full, k_free, v_full, v_free, turns, queries, keys, scale,
                    True, CAUSAL, PING_PONG, ME, CONSUMERS, SCORES, SUMS, LEFT,
                )  # fmt: skip
        mbarrier.arrive(q_free, count=1)
        mbarrier.wait(v_full.index(slot), phase)
        total = warpgroup_mma(weights, v_s.index(slot).reshape([KEYS, DIM]), total, is_async=True)
        line = (row.to(gl.int64) * heads + head) * queries
        gl.store(lse_ptr + line + query, (largest + gl.log2(sums)) * LN_2, mask=query < queries)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(v_free.index(slot), count=1)
        total = total * gl.convert_layout(1 / sums, gl.SliceLayout(1, SUMS))[:, None]
        tma.store_wait(pendings=0)  # the last tile's has been read
        out_s.index(ME).reshape([ROWS, DIM]).store(total.to(q.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, first_query, head * DIM], out_s.index(ME))
    tma.store_wait(pendings=0)


@gluon.jit
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, bounds_ptr,  # [B, S, heads · DIM], …, [B, heads, S], [B, S, 2]
    batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = q_desc.block_type.shape
    KEYS: gl.constexpr = k_desc.block_type.shape
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS] + TILE, q_desc.layout)
    out_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS] + TILE, out_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + KEYS, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + KEYS, v_desc.layout)
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
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (
                    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
                    batch, queries, keys, heads, tiles, scale, GROUP, CAUSAL, PING_PONG, AT_A_TIME, 0,
                )),
                (attend_rows, (
                    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
                    batch, queries, keys, heads, tiles, scale, GROUP, CAUSAL, PING_PONG, AT_A_TIME, 1,
                )),
                (load_tiles, (
                    q_desc, k_desc, v_desc, bounds_ptr, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                    batch, queries, keys, heads, tiles, GROUP, CAUSAL, AT_A_TIME,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_rows, (
                    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
                    batch, queries, keys, heads, tiles, scale, GROUP, CAUSAL, PING_PONG, AT_A_TIME, 0,
                )),
                (attend_rows, (
                    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
                    batch, queries, keys, heads, tiles, scale, GROUP, CAUSAL, PING_PONG, AT_A_TIME, 1,
                )),
                (attend_rows, (
                    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, out_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
                    batch, queries, keys, heads, tiles, scale, GROUP, CAUSAL, PING_PONG, AT_A_TIME, 2,
                )),
                (load_tiles, (
                    q_desc, k_desc, v_desc, bounds_ptr, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                    batch, queries, keys, heads, tiles, GROUP, CAUSAL, AT_A_TIME,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, config: Forward, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and the natural logarithm of each row's sum of exponentials, [batch, heads, queries]; `bounds` are those of
    causal documents, as `document_bounds` finds them."""
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    q, k, v = by_rows(q), by_rows(k), by_rows(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    tiles = batch * heads * cdiv(queries, config.consumers * ROWS)
    programs = min(multiprocessors(q.device), tiles) if config.persistent else tiles
    launch(
        attention_fwd_kernel, (programs,),
        tiles_of(q, ROWS), tiles_of(k, config.keys), tiles_of(v, config.keys), tiles_of(out, ROWS), lse, bounds,
        batch, queries, keys, heads, tiles, scale,
        GROUP=heads // kv_heads, CAUSAL=causal, PING_PONG=config.ping_pong, AT_A_TIME=config.heads_at_a_time,
        CONSUMERS=config.consumers, SLOTS=config.slots,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.consumers], PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out, lse
