"""The backward of attention on Hopper, one pass over all pairs of queries and keys, five products a pair of tiles.

With P = exp(scale · Q Kᵀ - lse), the softmax that the forward left the logarithm of its sums for, and delta = Σ dO · O:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P · (dP - delta)        dK = scale · dSᵀ Q        dQ = scale · dS K

A program has KEYS keys and values of one head in shared memory and walks over the queries that see them, a tile at a
time, of all the heads that share these keys. Its warps have three roles:

    producer         a warp   brings Q, dO, lse and delta of the next tile into a ring of slots, by TMA
    keys  0 …  63    4 warps  Sᵀ, dPᵀ, then Pᵀ and dSᵀ in registers, where they stay as the left side of dV and dK
    keys 64 … 127    4 warps  the same

                              both put their dSᵀ into the slot, and each multiplies some of it by K: its share of dQ, which
                              TMA adds to a float32 sum in global memory

A tile has two parts of 64 queries for heads of 64, one after the other, since the scores of both at once would not fit
beside the sums in registers; of its dQ each group makes one part. For heads of 128 it has one part, and each group makes
half of the columns.

The scores of the next part are made under the end of this one. One barrier gives a slot back, when the last product that
reads it is done. Programs whose keys are seen by most queries come first, and a few heads at a time, so that what they
read and add to stays in the L2. The order in which dQ is added up is left to the hardware: its last bits may differ from
run to run, as in other libraries' fast backward.

Keys of packed documents are seen by queries up to the end of their document, which stand in order: a program's last query
is that of its last key, and up to the end of its first key's document nothing is hidden but by the diagonal.

The small kernels around it make delta and zeros before, and round dQ after. Where a gradient arrives at the log-sum-exp as
well (flex_attention.py), it is taken off delta.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilestack.contract.launch import launch
from tilestack.kernels.attention.before_keys import before_first_key, behind_zeros
from tilestack.kernels.hopper.attention_tiles import as_tma_reads, empty_as, place_in_bands, tiles_of
from tilestack.kernels.hopper.matmul import next_in_ring
from tilestack.kernels.tiles import cdiv

KEYS = 128  # of a program, half of them for each group of warps
QUERIES = {64: 128, 128: 64}  # of a tile, by the size of a head
PART = 64  # of these a group of warps has at a time
SLOTS = 2  # tiles in flight
HEADS_AT_A_TIME = 8  # of keys and values
# Of a thread, by the size of a head: in the second group of keys (the first gets what is left), and of the producer.
REGISTERS = {64: (232, 40), 128: (240, 24)}
PREPARED_ROWS = 32
ROUNDED = 4096
LOG2_E = tl.constexpr(1.4426950408889634)


@builtin
def async_add(descriptor, place, tile, _semantic=None):
    """Let TMA add a tile of shared memory to global memory. Gluon has the instruction, but no function for it yet."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, tile.handle)


@gluon.jit
def keys_of_program(keys, kv_heads, KEYS: gl.constexpr, AT_A_TIME: gl.constexpr):
    """(batch, head of keys, first key) of this program: the first keys first, which most queries see."""
    blocks = gl.cdiv(keys, KEYS)
    head, block = place_in_bands(gl.program_id(0), gl.num_programs(0) // blocks, blocks, AT_A_TIME)
    return head // kv_heads, head % kv_heads, block * KEYS


@gluon.jit
def first_query_of(first_key, queries, keys, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """Where the tiles begin whose queries see a program's keys."""
    return gl.maximum(first_key + queries - keys, 0) // QUERIES * QUERIES if CAUSAL else 0


@gluon.jit
def end_of_document(bounds_ptr, batch, key, queries, keys):
    """The query after the last one that sees a key, of this place or else the last; of whole rows, that after the last."""
    if bounds_ptr is None:
        return queries
    else:
        return gl.load(bounds_ptr + 2 * (batch.to(gl.int64) * keys + gl.minimum(key, keys - 1)) + 1)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, bounds_ptr,
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, q_full, do_full, free,
    queries, keys, kv_heads, GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = q_s.shape[0]
    QUERIES: gl.constexpr = q_s.shape[3]
    HALF: gl.constexpr = k_s.shape[3]
    batch, kv_head, first_key = keys_of_program(keys, kv_heads, 2 * HALF, AT_A_TIME)
    mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        at = [batch, kv_head, first_key + half * HALF, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_full, k_s.index(half))
        tma.async_copy_global_to_shared(v_desc, at, kv_full, v_s.index(half))
    query = gl.arange(0, QUERIES, layout=gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    start = first_query_of(first_key, queries, keys, QUERIES, CAUSAL)
    end = end_of_document(bounds_ptr, batch, first_key + 2 * HALF - 1, queries, keys)
    slot = 0
    phase = 1
    for of_group in range(GROUP):
        head = kv_head * GROUP + of_group
        line = (batch.to(gl.int64) * kv_heads * GROUP + head) * queries
        for first in range(start, end, QUERIES):
            inside = first + query < queries
            lse = gl.load(lse_ptr + line + first + query, mask=inside, other=float("inf"))
            delta = gl.load(delta_ptr + line + first + query, mask=inside, other=0.0)
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, head, first, 0], q_full.index(slot), q_s.index(slot))
            lse_s.index(slot).store(lse * LOG2_E)
            mbarrier.arrive(q_full.index(slot), count=1)
            delta_s.index(slot).store(delta)
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [batch, head, first, 0], do_full.index(slot), do_s.index(slot))
            mbarrier.arrive(do_full.index(slot), count=1)
            slot, phase = next_in_ring(slot, phase, SLOTS)
    # One tile more, for the scores that are made ahead and never used.
    mbarrier.wait(free.index(slot), phase)
    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, kv_head, start, 0], q_full.index(slot), q_s.index(slot))
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def half_of_keys(
    dq_desc, dk_desc, dv_desc, bounds_ptr,
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full, do_full, ds_full, free,
    queries, keys, kv_heads, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = q_s.shape[0]
    QUERIES: gl.constexpr = q_s.shape[3]
    DIM: gl.constexpr = q_s.shape[4]
    HALF: gl.constexpr = k_s.shape[3]
    PART: gl.constexpr = dq_s.shape[3]
    PARTS: gl.constexpr = QUERIES // PART
    COLUMNS: gl.constexpr = dq_s.shape[4]
    DTYPE: gl.constexpr = q_s.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    batch, kv_head, first_key = keys_of_program(keys, kv_heads, 2 * HALF, AT_A_TIME)
    k = k_s.index(ME).reshape([HALF, DIM])
    v = v_s.index(ME).reshape([HALF, DIM])
    key = first_key + ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    if CAUSAL:  # a key's place among the queries, whose last stands at the last key
        key += queries - keys
        whole_from = first_key + 2 * HALF + queries - keys  # this query and those after it see all of these keys
    end = end_of_document(bounds_ptr, batch, first_key + 2 * HALF - 1, queries, keys)
    if bounds_ptr is not None:
        whole_to = end_of_document(bounds_ptr, batch, first_key, queries, keys)  # those before this query do, so far
    query = gl.arange(0, PART, layout=OF_QUERIES)
    dk = gl.zeros((HALF, DIM), gl.float32, SUMS)
    dv = gl.zeros((HALF, DIM), gl.float32, SUMS)
    start = first_query_of(first_key, queries, keys, QUERIES, CAUSAL)
    head = kv_head * GROUP
    first = start
    slot = 0
    phase = 0
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    nothing = gl.zeros((HALF, PART), gl.float32, SCORES)
    q = q_s.index(0).reshape([QUERIES, DIM]).slice(0, PART, 0)
    s = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for _ in range(gl.cdiv(end - start, QUERIES) * GROUP):
        mbarrier.wait(do_full.index(slot), phase)
        for part in gl.static_range(PARTS):
            q = q_s.index(slot).reshape([QUERIES, DIM]).slice(part * PART, PART, 0)
            do = do_s.index(slot).reshape([QUERIES, DIM]).slice(part * PART, PART, 0)
            dp = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            lse = lse_s.index(slot).slice(part * PART, PART, 0).load(OF_QUERIES)
            p = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
            if CAUSAL:
                cut = first + part * PART < whole_from
                if bounds_ptr is not None:
                    cut = cut | (first + (part + 1) * PART > whole_to)
                if cut:
                    at = (first + part * PART + query)[None, :]
                    sees = key[:, None] <= at
                    if bounds_ptr is not None:
                        sees = sees & (at < end_of_document(bounds_ptr, batch, key, queries, keys)[:, None])
                    p = gl.where(sees, p, 0.0)
            elif first_key + 2 * HALF > keys:  # what 2^-lse makes of keys that are not there may be infinite
                p = gl.where((key < keys)[:, None], p, 0.0)
            dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            delta = delta_s.index(slot).slice(part * PART, PART, 0).load(OF_QUERIES)
            ds = (p * (dp - delta[None, :])).to(DTYPE)
            ds_s.index((2 * slot + ME) * PARTS + part).store(ds)
            if part + 1 < PARTS:
                coming_q = q_s.index(slot).reshape([QUERIES, DIM]).slice((part + 1) * PART, PART, 0)
                s = warpgroup_mma(k, coming_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
            else:
                fence_async_shared()
                mbarrier.arrive(ds_full.index(slot), count=1)
                dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
        mbarrier.wait(ds_full.index(slot), phase)
        dq = gl.zeros((PART, COLUMNS), gl.float32, DQ)
        for half in gl.static_range(2):
            right = k_s.index(half).reshape([HALF, DIM])
            if COLUMNS < DIM:  # half of the columns of dQ
                left = ds_s.index(2 * slot + half)
                right = right.slice(ME * COLUMNS, COLUMNS, 1)
            else:  # half of its rows
                left = ds_s.index((2 * slot + half) * PARTS + ME)
            dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=half == 1, is_async=True)
        coming, its_phase = next_in_ring(slot, phase, SLOTS)
        mbarrier.wait(q_full.index(coming), its_phase)
        dv, dk = warpgroup_mma_wait(2, deps=(dv, dk))
        q = q_s.index(coming).reshape([QUERIES, DIM]).slice(0, PART, 0)
        s = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(free.index(slot), count=1)
        tma.store_wait(0)
        dq_s.index(ME).reshape([PART, COLUMNS]).store(dq)
        fence_async_shared()
        if COLUMNS < DIM:
            async_add(dq_desc, [batch, head, first, ME * COLUMNS], dq_s.index(ME))
        else:
            async_add(dq_desc, [batch, head, first + ME * PART, 0], dq_s.index(ME))
        s = warpgroup_mma_wait(0, deps=(s,))
        first += QUERIES
        head += (first >= end).to(gl.int32)
        first = gl.where(first >= end, start, first)
        slot = coming
        phase = its_phase
    at = [batch, kv_head, first_key + ME * HALF, 0]
    v.store(dv.to(DTYPE))  # nobody else reads this half of the values
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_desc, at, v_s.index(ME))
    tma.store_wait(0)
    v.store((dk * scale).to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, at, v_s.index(ME))
    tma.store_wait(0)


@gluon.jit
def attention_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, bounds_ptr,
    queries, keys, kv_heads, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, SLOTS: gl.constexpr,
    KEY_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = q_desc.block_type.shape
    HALF: gl.constexpr = k_desc.block_type.shape
    DTYPE: gl.constexpr = q_desc.dtype
    PART: gl.constexpr = dq_desc.block_type.shape[2]
    DS: gl.constexpr = [HALF[2], PART]
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2] + HALF, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2] + HALF, v_desc.layout)
    ds_s = gl.allocate_shared_memory(
        DTYPE, [2 * SLOTS * (TILE[2] // PART)] + DS, gl.NVMMASharedLayout.get_default_for(DS, DTYPE)
    )
    dq_s = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [SLOTS, TILE[2]], LINES)
    delta_s = gl.allocate_shared_memory(gl.float32, [SLOTS, TILE[2]], LINES)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(slot), count=2)  # TMA's bytes, and what the producer stores itself
        mbarrier.init(do_full.index(slot), count=2)
        mbarrier.init(ds_full.index(slot), count=2)  # both halves of the keys
        mbarrier.init(free.index(slot), count=2)
    gl.warp_specialize(
        [
            (half_of_keys, (
                dq_desc, dk_desc, dv_desc, bounds_ptr, q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full,
                do_full, ds_full, free, queries, keys, kv_heads, scale, GROUP, CAUSAL, AT_A_TIME, 0,
            )),
            (half_of_keys, (
                dq_desc, dk_desc, dv_desc, bounds_ptr, q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full,
                do_full, ds_full, free, queries, keys, kv_heads, scale, GROUP, CAUSAL, AT_A_TIME, 1,
            )),
            (producer, (
                q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, bounds_ptr, q_s, do_s, k_s, v_s, lse_s, delta_s,
                kv_full, q_full, do_full, free, queries, keys, kv_heads, GROUP, CAUSAL, AT_A_TIME,
            )),
        ],
        [4, 1],
        [KEY_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@triton.jit
def prepare_kernel(
    out_ptr, do_ptr, dlse_ptr, delta_ptr, dq_ptr,  # [B, S, heads, DIM] twice, [B, heads, S] twice, as many numbers as q has
    rows, length, heads,
    out_batch_stride, out_stride, out_head_stride, do_batch_stride, do_stride, do_head_stride,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta for each (batch, token, head), turned to (batch, head, token), less what arrives at the log-sum-exp; and zeros for
    dQ to be added to."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of which no memory holds 2³¹, as it does of elements
    inside = row < rows
    head, token = (row % heads).to(tl.int64), (row // heads % length).to(tl.int64)
    batch = (row // heads // length).to(tl.int64)
    element = tl.arange(0, DIM)[None, :]
    out_row = batch * out_batch_stride + token * out_stride + head * out_head_stride
    do_row = batch * do_batch_stride + token * do_stride + head * do_head_stride
    out = tl.load(out_ptr + out_row[:, None] + element, mask=inside[:, None], other=0).to(tl.float32)
    do = tl.load(do_ptr + do_row[:, None] + element, mask=inside[:, None], other=0).to(tl.float32)
    delta = tl.sum(out * do, 1)
    place = (batch * heads + head) * length + token
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=inside, other=0)
    tl.store(delta_ptr + place, delta, mask=inside)
    tl.store(
        dq_ptr + row.to(tl.int64)[:, None] * DIM + element, tl.zeros([ROWS, DIM], tl.float32), mask=inside[:, None]
    )


@triton.jit
def round_kernel(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n)
    tl.store(out_ptr + places, (x * scale).to(out_ptr.dtype.element_ty), mask=places < n)


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bounds: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV; lse is [batch, heads, queries], the natural logarithm of the sums the softmax divides by, and grad_lse what
    arrives at it. `bounds` are those of causal documents, as `document_bounds` finds them."""
    if first := before_first_key(q, k, causal):
        grad, q, out = grad[:, first:], q[:, first:], out[:, first:]
        grad_lse = None if grad_lse is None else grad_lse[..., first:]
        dq, dk, dv = gradients(grad, q, k, v, out, lse[..., first:], causal, scale, grad_lse=grad_lse)
        return behind_zeros(dq, first), dk, dv
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    grad, q, k, v, out = (as_tma_reads(x) for x in (grad, q, k, v, out))
    dq, dk, dv, total = empty_as(q), empty_as(k), empty_as(v), empty_as(q, torch.float32)
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    rows, tile = batch * queries * heads, QUERIES[dim]
    launch(
        prepare_kernel, (cdiv(rows, PREPARED_ROWS),), out, grad, grad_lse, delta, total, rows, queries, heads,
        *out.stride()[:3], *grad.stride()[:3], DIM=dim, ROWS=PREPARED_ROWS, num_warps=4,
    )  # fmt: skip
    launch(
        attention_bwd_kernel, (batch * kv_heads * cdiv(keys, KEYS),),
        tiles_of(q, tile), tiles_of(k, KEYS // 2), tiles_of(v, KEYS // 2), tiles_of(grad, tile),
        tiles_of(total, PART, dim * tile // (2 * PART)), tiles_of(dk, KEYS // 2), tiles_of(dv, KEYS // 2),
        lse, delta, bounds,
        queries, keys, kv_heads, scale,
        GROUP=heads // kv_heads, CAUSAL=causal, AT_A_TIME=HEADS_AT_A_TIME, SLOTS=SLOTS,
        KEY_REGISTERS=REGISTERS[dim][0], PRODUCER_REGISTERS=REGISTERS[dim][1], num_warps=4,
    )  # fmt: skip
    launch(
        round_kernel, (cdiv(dq.numel(), ROUNDED),), total, dq, dq.numel(), scale, BLOCK=ROUNDED, num_warps=8
    )  # fmt: skip
    return dq, dk, dv
