"""Linear layers with what follows them on Hopper in Gluon: the top rung (`matmul.py`) with another end of a tile.

    total ──+ bias──▶ pre ──activation──▶ ──+ residual──▶ rounded once ──▶ c ──dropout, + residual──▶ c
                       └─ also stored where a gradient will ask for it      └─ a pass of its own, where there is a seed

A tile of the residual comes by TMA into the buffer that the result will leave through: it is asked for as soon as the last
tile has left, and is there when the sums are. So nothing is read or written an element at a time, and an epilogue takes no
more registers than its numbers. Dropout would take more than there are: it goes over the stored result once more, and the
residual, which comes after it, with it. That rounds where the pipelined product does, which drops from memory too.
"""

import functools

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
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate
from tilestack.kernels.elementwise.dropout import dropout_add_in_place
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    WARPS,
    Config,
    hopper_product,
    load_tiles,
    next_in_ring,
    place_of_tile,
    ring_of,
    tile_of,
)
from tilestack.kernels.matmul.epilogue import PLAIN, Epilogue
from tilestack.kernels.matmul.fused import (
    empty_pre,
    fused_by,
    has_activation,
    stores_vectors,
    with_gradients,
)
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.matmul.tma import in_rows, movable
from tilestack.kernels.tiles import cdiv, multiprocessors

CONFIGS = {
    "128x128": Config(128, 128, slots=6, store_n=128),
    "128x256": Config(128, 256, slots=3, store_n=256),
    "128x64": Config(128, 64, slots=8, store_n=64),
    "128x128 band 16": Config(128, 128, slots=6, store_n=128, band=16),
}


@gluon.jit
def multiply_and_finish(
    c_desc, residual_desc, pre_desc, bias_ptr, a_s, b_s, c_s, full, free, come, M, N, K,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, KEEPS_PRE: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply what arrives, and finish each tile."""
    SLOTS: gl.constexpr = a_s.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    slot = 0
    phase = 0
    last = 0
    turn = 0  # of the residual's barrier
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = place_of_tile(tile, M, N, BAND, BLOCK_M, BLOCK_N)
        if HAS_RESIDUAL:
            tma.store_wait(pendings=0)
            mbarrier.expect(come, residual_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(residual_desc, [m, n], come, c_s)
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            a = a_s.index(slot).permute((1, 0)) if A_TURNED else a_s.index(slot)
            b = b_s.index(slot).permute((1, 0)) if B_TURNED else b_s.index(slot)
            total = warpgroup_mma(a, b, total, use_acc=(k != 0), is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))  # the step before is done: its slot is free
            mbarrier.arrive(free.index(last), count=1, pred=(k != 0))
            last = slot
            slot, phase = next_in_ring(slot, phase, SLOTS)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index(last), count=1)
        if HAS_BIAS:
            column = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
            total += gl.load(bias_ptr + column, mask=column < N, other=0).to(gl.float32)[None, :]
        if HAS_RESIDUAL:
            mbarrier.wait(come, turn)
            turn ^= 1
            residual = c_s.load(LAYOUT)
        if ACTIVATION != "none":
            # Rounded as it is stored, so that the gradient is that of what was computed.
            pre = total.to(c_desc.dtype)
            if KEEPS_PRE:
                store_tile(pre_desc, c_s, pre, m, n)
            total = activate(pre.to(gl.float32), ACTIVATION, True)
        if HAS_RESIDUAL:
            total += residual.to(gl.float32)
        store_tile(c_desc, c_s, total.to(c_desc.dtype), m, n)
    tma.store_wait(pendings=0)


@gluon.jit
def store_tile(desc, c_s, tile, m, n):
    """Store a tile through one buffer; it is still on its way on return."""
    tma.store_wait(pendings=0)
    c_s.store(tile)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [m, n], c_s)


@gluon.jit
def fused_hopper_kernel(
    a_desc, b_desc, c_desc, residual_desc, pre_desc, bias_ptr,  # [M, K], [K, N], [M, N] three times, [N] or None
    M, N, K,
    ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, KEEPS_PRE: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, BAND: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS)
    c_s = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(come, count=1)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    gl.warp_specialize(
        [
            (multiply_and_finish, (
                c_desc, residual_desc, pre_desc, bias_ptr if HAS_BIAS else 0, a_s, b_s, c_s, full, free, come, M, N, K,
                ACTIVATION, HAS_BIAS, HAS_RESIDUAL, KEEPS_PRE, A_TURNED, B_TURNED, BAND, BLOCK_M, BLOCK_N, BLOCK_K, WARPS,
            )),
            (load_tiles, (
                a_desc, b_desc, a_s, b_s, full, free, M, N, K, A_TURNED, B_TURNED, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def fused_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config, epilogue: Epilogue = PLAIN) -> Tensor:
    """a @ b + bias, then the epilogue, for matrices of any strides; those that TMA cannot move are copied."""
    if epilogue.seed is not None:
        c = fused_product(a, b, bias, config, Epilogue(epilogue.activation, pre=epilogue.pre))
        return dropout_add_in_place(c, epilogue.residual, epilogue.seed, epilogue.p)
    if (epilogue.activation == "none" and epilogue.residual is None) or 0 in (*a.shape, b.shape[1]):
        return hopper_product(a, b, bias, config)
    if epilogue.pre is not None and config.n > 128:
        config = CONFIGS["128x128"]  # two results of a tile are more than registers hold beside a wider one
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block = (config.m, config.n)
    c_tile = tile_of(c, block)
    residual = c_tile if epilogue.residual is None else tile_of(in_rows(epilogue.residual), block)
    pre = c_tile if epilogue.pre is None else tile_of(epilogue.pre, block)
    step = K_BYTES // a.element_size()
    (a, a_turned), (b, b_turned) = movable(a), movable(b)
    launch(
        fused_hopper_kernel, (min(multiprocessors(c.device), cdiv(M, config.m) * cdiv(N, config.n)),),
        tile_of(a, (step, config.m) if a_turned else (config.m, step)),
        tile_of(b, (config.n, step) if b_turned else (step, config.n)),
        c_tile, residual, pre, None if bias is None else bias.contiguous(), M, N, K,
        ACTIVATION=epilogue.activation, HAS_RESIDUAL=epilogue.residual is not None, KEEPS_PRE=epilogue.pre is not None,
        A_TURNED=a_turned, B_TURNED=b_turned, BAND=config.band, SLOTS=config.slots,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=step,
        WARPS=WARPS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return c


fused_and_pre, fused_backward, fused_backward_from_pre = with_gradients(fused_product)


@implements(
    ops.fused_linear,
    backend="gluon",
    repeat=straight_line,
    backward=fused_backward,
    extras=Extras(fused_and_pre, fused_backward_from_pre, when=has_activation, fake=empty_pre),
    when=stores_vectors,
    dtypes=HALVES,
    configs=CONFIGS,
)
def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, activation: str,
    p: float, config: Config,
) -> Tensor:  # fmt: skip
    product = functools.partial(fused_product, config=config)
    return fused_by(product, False, x, weight, bias, residual, seed, activation, p)[0]
