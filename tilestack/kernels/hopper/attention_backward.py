"""The backward of attention on Hopper, one pass over all pairs of queries and keys, five products a pair of tiles.

With P = exp(scale · Q Kᵀ - lse), the softmax that the forward left the logarithm of its sums for, and delta = Σ dO · O:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P · (dP - delta)        dK = scale · dSᵀ Q        dQ = scale · dS K

A program has KEYS keys and values of one head in shared memory and walks over the queries that see them, QUERIES at a
time, of all the heads that share these keys. Its warps have three roles:

    producer         a warp   brings Q, dO, lse and delta of the next tile into a ring of slots, by TMA
    keys  0 …  63    4 warps  Sᵀ, dPᵀ, then Pᵀ and dSᵀ in registers, where they stay as the left side of dV and dK
    keys 64 … 127    4 warps  the same

                              both put their dSᵀ into the slot, and each multiplies all of it by one half of K's columns:
                              a half of dQ, which TMA adds to a float32 sum in global memory

The scores of the next tile are made under the end of this one. One barrier gives a slot back, when the last product that
reads it is done. Programs whose keys are seen by most queries come first, and a few heads at a time, so that what they
read and add to stays in the L2. The order in which dQ is added up is left to the hardware: its last bits may differ from
run to run, as in other libraries' fast backward.

The small kernels around it make delta and zeros before, and round dQ after.
"""

import functools
from typing import Any

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

from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.kernels.tiles import cdiv

DIM = 128  # of a head
KEYS = 128  # of a program, half of them for each group of warps
QUERIES = 64  # of a tile
SLOTS = 2  # tiles in flight
HEADS_AT_A_TIME = 8  # of keys and values
REGISTERS = 240, 24  # of a thread: in the second group of keys (the first gets what is left), and of the producer
PREPARED_ROWS = 32
ROUNDED = 4096
LOG2_E = tl.constexpr(1.4426950408889634)


@builtin
def async_add(descriptor, place, tile, _semantic=None):
    """Let TMA add a tile of shared memory to global memory. Gluon has the instruction, but no function for it yet."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, tile.handle)


@gluon.jit
def place_of(length, kv_heads, KEYS: gl.constexpr, AT_A_TIME: gl.constexpr):
    """(batch, head of keys, first key) of this program: AT_A_TIME heads together, the first keys first."""
    blocks = gl.cdiv(length, KEYS)
    program = gl.program_id(0)
    first = program // (AT_A_TIME * blocks) * AT_A_TIME
    within = program % (AT_A_TIME * blocks)
    together = gl.minimum(AT_A_TIME, gl.num_programs(0) // blocks - first)
    head = first + within % together
    return head // kv_heads, head % kv_heads, within // together * KEYS


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    wraps = slot + 1 == SLOTS
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,
    q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full, q_full, do_full, free,
    length, kv_heads, GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = q_s.shape[0]
    QUERIES: gl.constexpr = q_s.shape[2]
    DIM: gl.constexpr = q_s.shape[3]
    HALF: gl.constexpr = k_s.shape[2]
    batch, kv_head, first_key = place_of(length, kv_heads, 2 * HALF, AT_A_TIME)
    mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        at = [batch, first_key + half * HALF, kv_head * DIM]
        tma.async_copy_global_to_shared(k_desc, at, kv_full, k_s.index(half))
        tma.async_copy_global_to_shared(v_desc, at, kv_full, v_s.index(half))
    query = gl.arange(0, QUERIES, layout=gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    start = first_key if CAUSAL else 0
    slot = 0
    phase = 1
    for of_group in range(GROUP):
        head = kv_head * GROUP + of_group
        line = (batch.to(gl.int64) * kv_heads * GROUP + head) * length
        for first in range(start, length, QUERIES):
            inside = first + query < length
            lse = gl.load(lse_ptr + line + first + query, mask=inside, other=float("inf"))
            delta = gl.load(delta_ptr + line + first + query, mask=inside, other=0.0)
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, first, head * DIM], q_full.index(slot), q_s.index(slot))
            lse_s.index(slot).store(lse * LOG2_E)
            delta_s.index(slot).store(delta)
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [batch, first, head * DIM], do_full.index(slot), do_s.index(slot))
            mbarrier.arrive(do_full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, SLOTS)
    # One tile more, for the scores that are made ahead and never used.
    mbarrier.wait(free.index(slot), phase)
    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, start, kv_head * DIM], q_full.index(slot), q_s.index(slot))


@gluon.jit
def half_of_keys(
    dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full, do_full, ds_full, free,
    length, kv_heads, scale, GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = q_s.shape[0]
    QUERIES: gl.constexpr = q_s.shape[2]
    DIM: gl.constexpr = q_s.shape[3]
    HALF: gl.constexpr = k_s.shape[2]
    COLUMNS: gl.constexpr = DIM // 2
    DTYPE: gl.constexpr = q_s.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    batch, kv_head, first_key = place_of(length, kv_heads, 2 * HALF, AT_A_TIME)
    k = k_s.index(ME).reshape([HALF, DIM])
    v = v_s.index(ME).reshape([HALF, DIM])
    key = first_key + ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    query = gl.arange(0, QUERIES, layout=OF_QUERIES)
    dk = gl.zeros((HALF, DIM), gl.float32, SUMS)
    dv = gl.zeros((HALF, DIM), gl.float32, SUMS)
    start = first_key if CAUSAL else 0
    head = kv_head * GROUP
    first = start
    slot = 0
    phase = 0
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    nothing = gl.zeros((HALF, QUERIES), gl.float32, SCORES)
    s = warpgroup_mma(k, q_s.index(0).reshape([QUERIES, DIM]).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for _ in range(gl.cdiv(length - start, QUERIES) * GROUP):
        q = q_s.index(slot).reshape([QUERIES, DIM])
        do = do_s.index(slot).reshape([QUERIES, DIM])
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
        p = gl.exp2(s * (scale * LOG2_E) - lse_s.index(slot).load(OF_QUERIES)[None, :])
        if CAUSAL:  # noqa: SIM102 - decided while compiling, what follows at run time
            if first < first_key + 2 * HALF:
                p = gl.where(key[:, None] <= (first + query)[None, :], p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp - delta_s.index(slot).load(OF_QUERIES)[None, :])).to(DTYPE)
        ds_s.index(2 * slot + ME).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
        mbarrier.wait(ds_full.index(slot), phase)
        dq = gl.zeros((QUERIES, COLUMNS), gl.float32, DQ)
        for half in gl.static_range(2):
            columns = k_s.index(half).reshape([HALF, DIM]).slice(ME * COLUMNS, COLUMNS, 1)
            left = ds_s.index(2 * slot + half).permute((1, 0))
            dq = warpgroup_mma(left, columns, dq, use_acc=half == 1, is_async=True)
        coming, its_phase = next_slot(slot, phase, SLOTS)
        mbarrier.wait(q_full.index(coming), its_phase)
        dv, dk = warpgroup_mma_wait(2, deps=(dv, dk))
        s = warpgroup_mma(
            k, q_s.index(coming).reshape([QUERIES, DIM]).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(free.index(slot), count=1)
        tma.store_wait(0)
        dq_s.index(ME).reshape([QUERIES, COLUMNS]).store(dq)
        fence_async_shared()
        async_add(dq_desc, [batch, first, head * DIM + ME * COLUMNS], dq_s.index(ME))
        s = warpgroup_mma_wait(0, deps=(s,))
        first += QUERIES
        head += (first >= length).to(gl.int32)
        first = gl.where(first >= length, start, first)
        slot = coming
        phase = its_phase
    at = [batch, first_key + ME * HALF, kv_head * DIM]
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
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_ptr, delta_ptr,
    length, kv_heads, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, AT_A_TIME: gl.constexpr, SLOTS: gl.constexpr,
    KEY_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = q_desc.block_type.shape
    HALF: gl.constexpr = k_desc.block_type.shape
    DTYPE: gl.constexpr = q_desc.dtype
    DS: gl.constexpr = [HALF[1], TILE[1]]
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2] + HALF, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2] + HALF, v_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2 * SLOTS] + DS, gl.NVMMASharedLayout.get_default_for(DS, DTYPE))
    dq_s = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [SLOTS, TILE[1]], LINES)
    delta_s = gl.allocate_shared_memory(gl.float32, [SLOTS, TILE[1]], LINES)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=2)  # TMA's bytes, and what the producer stores itself
        mbarrier.init(ds_full.index(slot), count=2)  # both halves of the keys
        mbarrier.init(free.index(slot), count=2)
    gl.warp_specialize(
        [
            (half_of_keys, (
                dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full, do_full,
                ds_full, free, length, kv_heads, scale, GROUP, CAUSAL, AT_A_TIME, 0,
            )),
            (half_of_keys, (
                dq_desc, dk_desc, dv_desc, q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s, kv_full, q_full, do_full,
                ds_full, free, length, kv_heads, scale, GROUP, CAUSAL, AT_A_TIME, 1,
            )),
            (producer, (
                q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, q_s, do_s, k_s, v_s, lse_s, delta_s, kv_full,
                q_full, do_full, free, length, kv_heads, GROUP, CAUSAL, AT_A_TIME,
            )),
        ],
        [4, 1],
        [KEY_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@triton.jit
def prepare_kernel(
    out_ptr, do_ptr, delta_ptr, dq_ptr,
    rows, length, heads, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta for each (batch, token, head), turned to (batch, head, token), and zeros for dQ to be added to."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    places = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    out = tl.load(out_ptr + places, mask=inside[:, None], other=0).to(tl.float32)
    do = tl.load(do_ptr + places, mask=inside[:, None], other=0).to(tl.float32)
    tl.store(dq_ptr + places, tl.zeros([ROWS, DIM], tl.float32), mask=inside[:, None])
    head, token = row % heads, row // heads
    tl.store(delta_ptr + (token // length * heads + head) * length + token % length, tl.sum(out * do, 1), mask=inside)


@triton.jit
def round_kernel(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n)
    tl.store(out_ptr + places, (x * scale).to(out_ptr.dtype.element_ty), mask=places < n)


def by_rows(x: Tensor) -> Tensor:
    """x, [batch, tokens, heads, dim], itself where a token's heads lie side by side and rows start on 16 bytes, else a copy."""
    side_by_side = x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
    places = x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:2])
    aligned = not any(place % 16 for place in places) and min(x.stride()[:2]) > 0
    return x if side_by_side and aligned else x.clone(memory_format=torch.contiguous_format)


def tiles_of(x: Tensor, rows: int, columns: int = DIM) -> Tile:
    """What TMA has to know of x, [batch, tokens, heads, dim], to move tiles of some tokens and columns of one head."""
    batch, tokens, heads, dim = x.shape
    block = (1, rows, columns)
    return Tile(x, (batch, tokens, heads * dim), (x.stride(0), x.stride(1), 1), block, layout_of(block, x.dtype))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV; lse is [batch, heads, queries], the natural logarithm of the sums the softmax divides by."""
    (batch, length, heads, dim), kv_heads = q.shape, k.shape[2]
    q, k, v = by_rows(q), by_rows(k), by_rows(v)
    grad, out, lse = by_rows(grad.contiguous()), out.contiguous(), lse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    total = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    rows = batch * length * heads
    launch(
        prepare_kernel, (cdiv(rows, PREPARED_ROWS),), out, grad, delta, total, rows, length, heads,
        DIM=dim, ROWS=PREPARED_ROWS, num_warps=4,
    )  # fmt: skip
    launch(
        attention_bwd_kernel, (batch * kv_heads * cdiv(length, KEYS),),
        tiles_of(q, QUERIES), tiles_of(k, KEYS // 2), tiles_of(v, KEYS // 2), tiles_of(grad, QUERIES),
        tiles_of(total, QUERIES, DIM // 2), tiles_of(dk, KEYS // 2), tiles_of(dv, KEYS // 2), lse, delta,
        length, kv_heads, scale,
        GROUP=heads // kv_heads, CAUSAL=causal, AT_A_TIME=HEADS_AT_A_TIME, SLOTS=SLOTS,
        KEY_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    launch(
        round_kernel, (cdiv(dq.numel(), ROUNDED),), total, dq, dq.numel(), scale, BLOCK=ROUNDED, num_warps=8
    )  # fmt: skip
    return dq, dk, dv
