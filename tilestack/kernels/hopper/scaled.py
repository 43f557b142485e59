"""A product of 8-bit codes on Hopper in Gluon, with their scales at its end: the top rung (`matmul.py`) with another consumer.

    c[m, n] = a_scale[m] · b_scale[n] · Σ_k a[m, k] · b[k, n] + bias[n]

The producer is the same: a step brings 128 bytes of every row, which are 128 codes. WGMMA adds codes up in int32, at most
224 columns to an instruction, so a tile of 256 columns takes two. Both operands must lie along K, as x and weight do. Scales,
zero points (`quantised/scaled.py` has the arithmetic) and bias meet the sums in registers, while the next tile's codes come.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.hopper import matmul
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    WARPS,
    load_tiles,
    next_in_ring,
    place_of_tile,
    ring_of,
    store_columns,
    tile_of,
)
from tilestack.kernels.matmul.tma import can_move, empty_rows, in_rows
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.quantised.scaled import contiguous, sums_that_zeros_need
from tilestack.kernels.tiles import as_matrix, cdiv, multiprocessors
from tilestack.ops.quantised_linear import result_dtype
from tilestack.tuning.model import Gpu, product_us


class Config(matmul.Config):
    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        faster = gpu._replace(flops_per_us=2 * gpu.flops_per_us)
        return product_us(M, N, K, self.m, self.n, faster, itemsize=1)


CONFIGS = {
    "128x256": Config(128, 256, slots=4, store_n=64),
    "128x128": Config(128, 128, slots=5, store_n=64),
    "256x128": Config(256, 128, slots=4, store_n=32),
    "128x256 band 16": Config(128, 256, slots=4, store_n=64, band=16),
}


@gluon.jit
def multiply_codes(
    c_desc, a_scale_ptr, b_scale_ptr, bias_ptr, a_zero_ptr, b_zero_ptr, a_sums_ptr, b_sums_ptr,
    a_s, b_s, c_s, full, free, M, N, K,
    HAS_BIAS: gl.constexpr, HAS_A_ZERO: gl.constexpr, HAS_B_ZERO: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply what arrives, turn sums into numbers, and hand each finished tile to TMA."""
    SLOTS: gl.constexpr = a_s.shape[0]
    STORE_N: gl.constexpr = c_s.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 128, 32]
    )
    slot = 0
    phase = 0
    last = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = place_of_tile(tile, M, N, BAND, BLOCK_M, BLOCK_N)
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, LAYOUT)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            total = warpgroup_mma(
                a_s.index(slot), b_s.index(slot).permute((1, 0)), total, use_acc=(k != 0), is_async=True
            )
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))  # the step before is done: its slot is free
            mbarrier.arrive(free.index(last), count=1, pred=(k != 0))
            last = slot
            slot, phase = next_in_ring(slot, phase, SLOTS)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index(last), count=1)
        row = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        column = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        if HAS_A_ZERO:
            a_zero = gl.load(a_zero_ptr + row, mask=row < M, other=0).to(gl.int32)
            total -= a_zero[:, None] * gl.load(b_sums_ptr + column, mask=column < N, other=0)[None, :]
        if HAS_B_ZERO:
            a_sums = gl.load(a_sums_ptr + row, mask=row < M, other=0)
            if HAS_A_ZERO:
                a_sums -= a_zero * K
            b_zero = gl.load(b_zero_ptr + column, mask=column < N, other=0).to(gl.int32)
            total -= a_sums[:, None] * b_zero[None, :]
        a_scale = gl.load(a_scale_ptr + row, mask=row < M, other=0).to(gl.float32)
        b_scale = gl.load(b_scale_ptr + column, mask=column < N, other=0).to(gl.float32)
        out = total.to(gl.float32) * (a_scale[:, None] * b_scale[None, :])
        if HAS_BIAS:
            out += gl.load(bias_ptr + column, mask=column < N, other=0).to(gl.float32)[None, :]
        store_columns(c_desc, c_s, out.to(c_desc.dtype), m, n, BLOCK_N // STORE_N)
    tma.store_wait(pendings=0)


@gluon.jit
def int8_hopper_kernel(
    a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, bias_ptr,  # tiles of [M, K], [N, K] and [M, N]; [M], [N], [N] or None
    a_zero_ptr, b_zero_ptr, a_sums_ptr, b_sums_ptr,  # [M], [N], [M], [N], each or None
    M, N, K,
    BAND: gl.constexpr, SLOTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS)
    c_s = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    HAS_A_ZERO: gl.constexpr = a_zero_ptr is not None
    HAS_B_ZERO: gl.constexpr = b_zero_ptr is not None
    gl.warp_specialize(
        [
            (multiply_codes, (
                c_desc, a_scale_ptr, b_scale_ptr, bias_ptr if HAS_BIAS else 0, a_zero_ptr if HAS_A_ZERO else 0,
                b_zero_ptr if HAS_B_ZERO else 0, a_sums_ptr if HAS_B_ZERO else 0, b_sums_ptr if HAS_A_ZERO else 0,
                a_s, b_s, c_s, full, free, M, N, K, HAS_BIAS, HAS_A_ZERO, HAS_B_ZERO, BAND, BLOCK_M, BLOCK_N, BLOCK_K, WARPS,
            )),
            (load_tiles, (
                a_desc, b_desc, a_s, b_s, full, free, M, N, K, False, True, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def can_move_codes(x: Tensor, weight: Tensor) -> bool | str:
    return can_move(x, weight) if x.numel() > 0 else "TMA moves no empty matrix"


@implements(
    ops.linear_int8,
    backend="gluon",
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    configs=CONFIGS,
    invariant=True,
    when=can_move_codes,
)
def linear_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, x_zero: Tensor | None,
    weight_zero: Tensor | None, dtype: str, config: Config,
) -> Tensor:  # fmt: skip
    rows = as_matrix(x)
    (M, K), N = rows.shape, weight.shape[0]
    c = empty_rows(M, N, like=x, dtype=result_dtype(weight_scale, dtype))
    if x_zero is not None or weight_zero is not None:
        config = CONFIGS["128x128"]  # more numbers for each column than registers hold beside more columns
    sums = sums_that_zeros_need(rows, weight, x_zero, weight_zero)
    block = config.store_n * 2 // c.element_size()  # as many bytes of a float32 as of a half
    programs = min(multiprocessors(c.device), cdiv(M, config.m) * cdiv(N, config.n))
    launch(
        int8_hopper_kernel, (programs,),
        tile_of(in_rows(rows), (config.m, K_BYTES)), tile_of(in_rows(weight), (config.n, K_BYTES)),
        tile_of(c, (config.m, block)), *contiguous(x_scale, weight_scale, bias, x_zero, weight_zero), *sums, M, N, K,
        BAND=config.band, SLOTS=config.slots, BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=K_BYTES,
        WARPS=WARPS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return c.contiguous().view(*x.shape[:-1], N)
