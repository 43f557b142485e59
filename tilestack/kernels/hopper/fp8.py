"""A product of fp8 codes on Hopper in Gluon, whose sums leave the tensor cores after every 128 of K (`quantised/fp8.py`).

    producer      1 warp    TMA brings 128 codes of each row of A and B into a slot of the ring: a block of their scales
    rows  0 … 63  4 warps   multiply a slot from nothing, wait, scale what came out, and add it to a sum in float32
    rows 64 …127  4 warps   the same

While one group of warps adds, the other one's product runs: they share nothing but the slots, which are free when both
have said so. Each stores its half of the tile by TMA, while the next tile's codes come.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    load_tiles,
    next_in_ring,
    place_of_tile,
    ring_of,
    store_columns,
    tile_of,
)
from tilestack.kernels.hopper.scaled import Config, can_move_codes
from tilestack.kernels.matmul.tma import empty_rows, in_rows
from tilestack.kernels.quantised.fp8 import OPERANDS, rounds_to_halves, scale_strides
from tilestack.kernels.quantised.scaled import contiguous
from tilestack.kernels.tiles import as_matrix, cdiv, multiprocessors
from tilestack.ops.quantised_linear import BLOCK, by_blocks, result_dtype

HALF = 64  # rows of a tile for each group of warps
CONSUMER_REGISTERS = 240  # of a thread in the second group; the first gets what is left

CONFIGS = {
    "128x128": Config(2 * HALF, 128, slots=5, store_n=128),
    "128x128 band 16": Config(2 * HALF, 128, slots=5, store_n=128, band=16),
    "128x64": Config(2 * HALF, 64, slots=8, store_n=64),
}


@gluon.jit
def add_up_steps(
    a_s, b_s, full, free, a_scales, b_scales, inside, nothing, slot, phase, K,
    BY_BLOCKS: gl.constexpr, OF_A_BLOCK: gl.constexpr, B_STACKED: gl.constexpr, BLOCK_K: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """The sums over K of a consumer's half of a tile, and where it is in the ring then; `nothing` is zeros of its shape.

    Scales of blocks are asked for a step ahead: from the cache they take longer than a step's product."""
    HALF: gl.constexpr = nothing.shape[0]
    SLOTS: gl.constexpr = a_s.shape[0]
    total = nothing
    if BY_BLOCKS:
        a_scale = gl.load(a_scales, mask=inside, other=0)
        b_scale = gl.load(b_scales)
    for k in range(0, K, BLOCK_K):
        if BY_BLOCKS:
            scale = a_scale.to(gl.float32) * b_scale.to(gl.float32)
            after = k + BLOCK_K
            a_scale = gl.load(a_scales + after // OF_A_BLOCK, mask=inside & (after < K), other=0)
            b_scale = gl.load(b_scales + after // OF_A_BLOCK, mask=after < K, other=0)
        mbarrier.wait(full.index(slot), phase)
        if B_STACKED:  # a tile of one of many matrices
            b = b_s.index(slot).reshape([nothing.shape[1], BLOCK_K])
        else:
            b = b_s.index(slot)
        a = a_s.index(slot).slice(ME * HALF, HALF, 0)
        part = warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_in_ring(slot, phase, SLOTS)
        if BY_BLOCKS:
            total += part * scale[:, None]
        else:
            total += part
    return total, slot, phase


@gluon.jit
def add_up_blocks(
    c_desc, a_scale_ptr, b_scale_ptr, bias_ptr, a_s, b_s, c_s, full, free, M, N, K, a_scale_stride, b_scale_stride,
    BY_BLOCKS: gl.constexpr, OF_A_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: its half of each tile, a block of K at a time."""
    STORE_N: gl.constexpr = c_s.shape[2]
    HALF: gl.constexpr = BLOCK_M // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    nothing = gl.zeros((HALF, BLOCK_N), gl.float32, LAYOUT)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = place_of_tile(tile, M, N, BAND, BLOCK_M, BLOCK_N)
        m += ME * HALF
        row = m + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        column = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        a_scales = a_scale_ptr + row.to(gl.int64) * a_scale_stride
        b_scales = b_scale_ptr + n // OF_A_BLOCK * b_scale_stride
        total, slot, phase = add_up_steps(
            a_s, b_s, full, free, a_scales, b_scales, row < M, nothing, slot, phase, K,
            BY_BLOCKS, OF_A_BLOCK, False, BLOCK_K, ME,
        )  # fmt: skip
        if not BY_BLOCKS:
            a_scale = gl.load(a_scales, mask=row < M, other=0).to(gl.float32)
            b_scale = gl.load(b_scale_ptr + column * b_scale_stride, mask=column < N, other=0).to(gl.float32)
            total *= a_scale[:, None] * b_scale[None, :]
        if HAS_BIAS:
            total += gl.load(bias_ptr + column, mask=column < N, other=0).to(gl.float32)[None, :]
        store_columns(c_desc, c_s.index(ME), total.to(c_desc.dtype), m, n, BLOCK_N // STORE_N)
    tma.store_wait(pendings=0)


@gluon.jit
def fp8_hopper_kernel(
    a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, bias_ptr,  # tiles of [M, K], [N, K] and [M, N]; scales; [N] or None
    M, N, K, a_scale_stride, b_scale_stride,
    BY_BLOCKS: gl.constexpr, OF_A_BLOCK: gl.constexpr, BAND: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS, 2)
    c_s = gl.allocate_shared_memory(c_desc.dtype, [2] + c_desc.block_type.shape, c_desc.layout)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    gl.warp_specialize(
        [
            (add_up_blocks, (
                c_desc, a_scale_ptr, b_scale_ptr, bias_ptr if HAS_BIAS else 0, a_s, b_s, c_s, full, free, M, N, K,
                a_scale_stride, b_scale_stride, BY_BLOCKS, OF_A_BLOCK, HAS_BIAS, BAND, BLOCK_M, BLOCK_N, BLOCK_K, 0,
            )),
            (add_up_blocks, (
                c_desc, a_scale_ptr, b_scale_ptr, bias_ptr if HAS_BIAS else 0, a_s, b_s, c_s, full, free, M, N, K,
                a_scale_stride, b_scale_stride, BY_BLOCKS, OF_A_BLOCK, HAS_BIAS, BAND, BLOCK_M, BLOCK_N, BLOCK_K, 1,
            )),
            (load_tiles, (
                a_desc, b_desc, a_s, b_s, full, free, M, N, K, False, True, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def can_move_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, dtype: str) -> bool | str:
    found = rounds_to_halves(x, weight_scale, dtype)
    return can_move_codes(x, weight) if found is True else found


@implements(ops.linear_fp8, backend="gluon", repeat=straight_line, dtypes=OPERANDS, configs=CONFIGS, when=can_move_fp8)
def linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str, config: Config
) -> Tensor:
    rows = as_matrix(x)
    (M, K), N = rows.shape, weight.shape[0]
    c = empty_rows(M, N, like=x, dtype=result_dtype(weight_scale, dtype))
    programs = min(multiprocessors(c.device), cdiv(M, config.m) * cdiv(N, config.n))
    launch(
        fp8_hopper_kernel, (programs,),
        tile_of(in_rows(rows), (config.m, K_BYTES)), tile_of(in_rows(weight), (config.n, K_BYTES)),
        tile_of(c, (HALF, config.store_n)), *contiguous(x_scale, weight_scale, bias),
        M, N, K, *scale_strides(x_scale, weight_scale),
        BY_BLOCKS=by_blocks(weight_scale), OF_A_BLOCK=BLOCK, BAND=config.band, SLOTS=config.slots,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=K_BYTES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return c.contiguous().view(*x.shape[:-1], N)
