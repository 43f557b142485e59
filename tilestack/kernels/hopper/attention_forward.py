"""The forward of attention on Hopper: one warp that only loads, and two groups of four that own 64 queries each.

    producer      1 warp    Q of a tile of queries, then the keys and values that it sees, into a ring of slots, by TMA
    consumer 0    4 warps   queries  0 …  63: S = Q Kᵀ by WGMMA, the online softmax in registers, O += P V
    consumer 1    4 warps   queries 64 … 127: the same, from the same slots

                   ← keys, from the last that is seen to the first
          +------+------+------+------+
    Q 0   |      |      |      | mask |      A row's last keys come first. Those are the tiles that a diagonal or the end
          +------+------+------+------+      of the keys cuts; all that follow are seen whole and pass the mask by.
    Q 1   |      |      |      | mask |
          +------+------+------+------+

Packed documents hide the keys before a query's own. Documents stand in order, so that what a tile's first query sees begins
no later than what its last sees: tiles of keys between the two beginnings are masked again, and those before are left out.

The product of the next scores is queued before P V of the last, so that the softmax runs under a product. A head of 64
has as many exponentials to make as tensor cores need time: with PING_PONG the consumers take turns at the tensor cores, so
that one's softmax lies under another's products.

Longest rows come first where there is a diagonal, some heads at a time, which share the L2. There are as many programs as
multiprocessors, and a program takes the next tile that nobody has by a counter in global memory: Q of the next tile comes
in during this one, and its first scores are made under this one's end. Handed out by turns instead, tiles of one length
would meet one program again and again, since bands of heads and multiprocessors are nearly as many. A result leaves from
where its queries lay. For the backward each row leaves the logarithm of its sum.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
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
from tilestack.contract.workspace import workspace
from tilestack.kernels.attention.before_keys import before_first_key, behind_zeros
from tilestack.kernels.hopper.attention_tiles import as_tma_reads, empty_as, place_in_bands, tiles_of
from tilestack.kernels.hopper.matmul import next_in_ring
from tilestack.kernels.tiles import cdiv, multiprocessors

CONSUMERS = 2
ROWS = 64  # queries of a consumer, what four warps multiply at a time
PRODUCER_REGISTERS = 24  # of a thread
CONSUMER_REGISTERS = 240  # of the second; the first gets what is left, a little more
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


class Forward(NamedTuple):
    """Keys of a tile and tiles of keys in flight; whether consumers take turns; and how many heads share the L2."""

    keys: int = 128
    slots: int = 2
    ping_pong: bool = False
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
def take_tile(next_ptr, tiles):
    """The number of a tile that no other program has, or one past the last. A program asks once for each tile it has, so
    that whoever is told the last number of all leaves a zero for the next launch."""
    before = gl.atomic_add(next_ptr, 1)
    if before == tiles - 1:
        gl.store(next_ptr, 0)
    return before + gl.num_programs(0)


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, bounds_ptr, next_ptr, q_s, k_s, v_s, number_s, q_full, q_free, k_full, k_free, v_full, v_free,
    batch, queries, keys, heads, tiles,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The producer: all that the consumers of this program will read, as room becomes free."""
    ROWS: gl.constexpr = q_s.shape[3]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    TILES: gl.constexpr = number_s.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    place = 0
    q_phase = 1
    number = gl.program_id(0)
    while number < tiles:
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, _ = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, _ = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        mbarrier.wait(q_free.index(place), q_phase)
        number_s.index(place).store(gl.full([1], number, gl.int32, ONE))
        mbarrier.expect(q_full.index(place), CONSUMERS * q_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            at = [row, head, first_query + consumer * ROWS, 0]
            tma.async_copy_global_to_shared(q_desc, at, q_full.index(place), q_s.index(place * CONSUMERS + consumer))
        mbarrier.arrive(q_full.index(place), count=1)
        place, q_phase = next_in_ring(place, q_phase, TILES)
        for step in range(seen - unseen):
            at = [row, head // GROUP, (seen - 1 - step) * KEYS, 0]
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_s.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)
        number = take_tile(next_ptr, tiles)  # while all slots are full
    # For the scores that are made ahead of a tile that is not there.
    mbarrier.wait(q_free.index(place), q_phase)
    number_s.index(place).store(gl.full([1], number, gl.int32, ONE))
    mbarrier.expect(q_full.index(place), CONSUMERS * q_desc.block_type.nbytes)
    for consumer in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            q_desc, [0, 0, 0, 0], q_full.index(place), q_s.index(place * CONSUMERS + consumer)
        )
    mbarrier.arrive(q_full.index(place), count=1)
    mbarrier.wait(k_free.index(slot), phase)
    mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [0, 0, 0, 0], k_full.index(slot), k_s.index(slot))


@gluon.jit
def hidden(s, first_key, query, start, queries, keys, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores, -inf where a query does not see a key or there is none; a query's document begins at `start`, if it has one."""
    KEYS: gl.constexpr = s.shape[1]
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    # A thread's keys are 0, 1, 8, 9, 16, … after one that depends on the thread: compared in two parts, none has a register.
    own, more = (key & 6)[None, :], (key & ~6)[None, :]
    if CAUSAL:  # the last query sees the last key, and no key is behind it
        seen = more <= (query + (keys - queries - first_key))[:, None] - own
        if start is not None:
            seen = seen & (more >= (start - first_key)[:, None] - own)
    else:
        seen = more < keys - first_key - own
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weights_of(s, largest, scale):
    """(2^(scale (s - top)), top, 2^(scale (largest - top))): a row's weights so far, its top so far, and how what was before
    fades. The top is taken off before scaling, so that its own weight is 1 and nothing else: 2^(scale s - scale top) in one
    instruction would leave it what rounding scale · top takes off, which large scores show in their gradients."""
    top = gl.maximum(largest, gl.max(s, 1))
    finite = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    return gl.exp2((s - finite[:, None]) * scale), top, gl.exp2((largest - finite) * scale)


@gluon.jit
def parts_of_sums(p):
    """Each row's sum in four parts, those of the threads that share it, which meet only at the end of the row."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def faded(rows, fade):
    return rows * gl.convert_layout(fade, gl.SliceLayout(1, rows.type.layout))[:, None]


@gluon.jit
def packed(weights):
    """Pairs of weights as numbers of 32 bits. A loop that handed on single ones would take pairs apart and put them together
    again in every turn, which costs an eighth of its instructions."""
    ROWS: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    low, high = gl.split(gl.reshape(weights, [ROWS, KEYS // 2, 2]))
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], gl.int32, True, 1)


@gluon.jit
def unpacked(pairs, DTYPE: gl.constexpr):
    ROWS: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], [gl.int16, gl.int16], True, 1)
    return gl.reshape(gl.join(low, high), [ROWS, 2 * PAIRS]).to(DTYPE, bitcast=True)


@gluon.jit
def attend_rows(
    out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, number_s, q_full, q_free, k_full, k_free, v_full, v_free, turns,
    batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr,
    CONSUMERS: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: ROWS queries of each of this program's tiles."""
    ROWS: gl.constexpr = q_s.shape[3]
    DIM: gl.constexpr = q_s.shape[4]
    SLOTS: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    TILES: gl.constexpr = number_s.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    scale = scale * LOG2_E
    nothing = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    slot = 0
    phase = 0
    place = 0
    q_phase = 0
    turn_phase = 1 if ME == 0 else 0
    number = gl.program_id(0)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    q = q_s.index(ME).reshape([ROWS, DIM])
    s = warpgroup_mma(
        q, k_s.index(0).reshape([KEYS, DIM]).permute((1, 0)), nothing, use_acc=False, is_async=True
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=(s,))
    while number < tiles:
        row, head, first_query = rows_of_tile(number, queries, heads, batch, CONSUMERS * ROWS, CAUSAL, AT_A_TIME)
        seen, _ = tiles_seen(first_query, queries, keys, CONSUMERS * ROWS, KEYS, CAUSAL)
        unseen, begun = first_tiles(bounds_ptr, row, first_query, queries, CONSUMERS * ROWS, KEYS)
        first_query += ME * ROWS
        _, whole = tiles_seen(first_query, queries, keys, ROWS, KEYS, CAUSAL)
        query = first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        start = None
        if bounds_ptr is not None:
            start = gl.load(bounds_ptr + 2 * (row.to(gl.int64) * queries + query), mask=query < queries, other=0)
        q = q_s.index(place * CONSUMERS + ME).reshape([ROWS, DIM])
        largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros((ROWS, DIM), gl.float32, SUMS)
        mbarrier.arrive(k_free.index(slot), count=1)
        if (seen - 1 >= whole) | (seen - 1 < begun):
            s = hidden(s, (seen - 1) * KEYS, query, start, queries, keys, CAUSAL, SCORES)
        p, largest, _ = weights_of(s, largest, scale)
        parts = parts_of_sums(p)
        pairs = packed(p.to(q.dtype))
        tma.store_wait(pendings=0)  # the last tile's result has been read by now, and others may come in where it lay
        mbarrier.arrive(q_free.index(1 - place), count=1, pred=number != gl.program_id(0))
        mbarrier.wait(v_full.index(slot), phase)
        for block in range(seen - 2, unseen - 1, -1):
            coming, its_phase = next_in_ring(slot, phase, SLOTS)
            mbarrier.wait(k_full.index(coming), its_phase)
            if PING_PONG:
                mbarrier.wait(turns.index(ME), turn_phase)
                turn_phase ^= 1
            k = k_s.index(coming).reshape([KEYS, DIM]).permute((1, 0))
            s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            weights = gl.convert_layout(unpacked(pairs, q.dtype), LEFT)
            total = warpgroup_mma(weights, v_s.index(slot).reshape([KEYS, DIM]), total, is_async=True)
            if PING_PONG:
                mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_free.index(coming), count=1)
            if (block >= whole) | (block < begun):
                s = hidden(s, block * KEYS, query, start, queries, keys, CAUSAL, SCORES)
            p, largest, fade = weights_of(s, largest, scale)
            parts = faded(parts, fade) + parts_of_sums(p)
            # Here, and not where it is needed: the assembler would move the wait for the product above all of the softmax
            # that should run under it, but not across this one.
            mbarrier.wait(v_full.index(coming), its_phase)
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(v_free.index(slot), count=1)
            total = faded(total, fade)
            pairs = packed(p.to(q.dtype))
            slot = coming
            phase = its_phase
        weights = gl.convert_layout(unpacked(pairs, q.dtype), LEFT)
        total = warpgroup_mma(weights, v_s.index(slot).reshape([KEYS, DIM]), total, is_async=True)
        last = slot
        slot, phase = next_in_ring(slot, phase, SLOTS)
        this = place
        # The next tile's first scores are made under the end of this one.
        place, q_phase = next_in_ring(place, q_phase, TILES)
        mbarrier.wait(q_full.index(place), q_phase)
        number = gl.sum(number_s.index(place).load(ONE), 0)
        mbarrier.wait(k_full.index(slot), phase)
        coming_q = q_s.index(place * CONSUMERS + ME).reshape([ROWS, DIM])
        k = k_s.index(slot).reshape([KEYS, DIM]).permute((1, 0))
        s = warpgroup_mma(coming_q, k, nothing, use_acc=False, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(v_free.index(last), count=1)
        sums = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
        line = (row.to(gl.int64) * heads + head) * queries
        gl.store(lse_ptr + line + query, (largest * scale + gl.log2(sums)) * LN_2, mask=query < queries)
        total = faded(total, 1 / sums)
        q.store(total.to(q.dtype))  # nobody else reads these queries, and their last scores are made
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, head, first_query, 0], q_s.index(this * CONSUMERS + ME))
        s = warpgroup_mma_wait(0, deps=(s,))
    tma.store_wait(pendings=0)


@gluon.jit
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, bounds_ptr, next_ptr,  # [B, heads, S, DIM], …, [B, heads, S], [B, S, 2], [1]
    batch, queries, keys, heads, tiles, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, AT_A_TIME: gl.constexpr,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = q_desc.block_type.shape
    KEYS: gl.constexpr = k_desc.block_type.shape
    DTYPE: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = 2  # of queries: this one's and the next one's
    q_s = gl.allocate_shared_memory(DTYPE, [TILES * CONSUMERS] + TILE, q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + KEYS, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + KEYS, v_desc.layout)
    number_s = gl.allocate_shared_memory(gl.int32, [TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(TILES):
        mbarrier.init(q_full.index(tile), count=2)  # TMA's bytes, and the tile's number
        mbarrier.init(q_free.index(tile), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=CONSUMERS)
        mbarrier.init(v_free.index(slot), count=CONSUMERS)
    gl.warp_specialize(
        [
            (attend_rows, (
                out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, number_s, q_full, q_free, k_full, k_free, v_full, v_free,
                turns, batch, queries, keys, heads, tiles, scale,
                GROUP, CAUSAL, PING_PONG, AT_A_TIME, CONSUMERS, 0,
            )),
            (attend_rows, (
                out_desc, lse_ptr, bounds_ptr, q_s, k_s, v_s, number_s, q_full, q_free, k_full, k_free, v_full, v_free,
                turns, batch, queries, keys, heads, tiles, scale,
                GROUP, CAUSAL, PING_PONG, AT_A_TIME, CONSUMERS, 1,
            )),
            (load_tiles, (
                q_desc, k_desc, v_desc, bounds_ptr, next_ptr, q_s, k_s, v_s, number_s,
                q_full, q_free, k_full, k_free, v_full, v_free,
                batch, queries, keys, heads, tiles, GROUP, CAUSAL, AT_A_TIME, CONSUMERS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, config: Forward, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and the natural logarithm of each row's sum of exponentials, [batch, heads, queries]; `bounds` are those of
    causal documents, as `document_bounds` finds them."""
    if first := before_first_key(q, k, causal):
        out, lse = attention_and_lse(q[:, first:], k, v, causal, scale, config)
        return behind_zeros(out, first), F.pad(lse, (first, 0), value=-torch.inf)
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    q, k, v = as_tma_reads(q), as_tma_reads(k), as_tma_reads(v)
    out = empty_as(q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    tiles = batch * heads * cdiv(queries, CONSUMERS * ROWS)
    next_tile = workspace("attention_fwd_next_tile", (1,), torch.int32, q.device)
    launch(
        attention_fwd_kernel, (min(multiprocessors(q.device), tiles),),
        tiles_of(q, ROWS), tiles_of(k, config.keys), tiles_of(v, config.keys), tiles_of(out, ROWS), lse, bounds, next_tile,
        batch, queries, keys, heads, tiles, scale,
        GROUP=heads // kv_heads, CAUSAL=causal, PING_PONG=config.ping_pong, AT_A_TIME=config.heads_at_a_time,
        CONSUMERS=CONSUMERS, SLOTS=config.slots, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out, lse
