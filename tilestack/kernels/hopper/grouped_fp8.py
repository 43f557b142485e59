"""The grouped product of fp8 codes on Hopper in Gluon: the groups of `grouped.py` with the consumers of `fp8.py`.

    producer      1 warp    walks over the groups and brings 128 codes of each row of A and of the group's B into the ring
    rows  0 … 63  4 warps   walk over the groups in step, and add each block's product to a sum in float32
    rows 64 …127  4 warps   the same

A half of a tile leaves by TMA where all its rows belong to the group, else row by row.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.hopper import scaled
from tilestack.kernels.hopper.fp8 import CONSUMER_REGISTERS, HALF, add_up_steps, can_move_fp8
from tilestack.kernels.hopper.grouped import first_in_next, load_groups, store_rows_up_to
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    place_of_tile,
    ring_of,
    store_columns,
    tile_of,
)
from tilestack.kernels.matmul.grouped import zero_rows_past
from tilestack.kernels.matmul.tma import empty_rows, in_rows
from tilestack.kernels.quantised.fp8 import OPERANDS
from tilestack.kernels.quantised.scaled import contiguous
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.ops.quantised_linear import BLOCK, result_dtype
from tilestack.tuning.model import Gpu


class Config(scaled.Config):
    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:  # type: ignore[override]
        # As if all groups were one, each of them ending with half a tile that is empty.
        return super().model_us(rows + groups * self.m // 2, N, K, gpu)


CONFIGS = {
    "128x128": Config(2 * HALF, 128, slots=5, store_n=128),
    "128x128 band 16": Config(2 * HALF, 128, slots=5, store_n=128, band=16),
    "128x64": Config(2 * HALF, 64, slots=8, store_n=64),
}


@gluon.jit
def add_up_groups(
    c_desc, c_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups,
    c_stride, a_scale_stride, b_scale_lines, b_scale_stride,
    BY_BLOCKS: gl.constexpr, OF_A_BLOCK: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: its half of each tile of each group, a block of K at a time."""
    STORE_N: gl.constexpr = c_s.shape[2]
    HALF: gl.constexpr = BLOCK_M // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    nothing = gl.zeros((HALF, BLOCK_N), gl.float32, LAYOUT)
    slot = 0
    phase = 0
    start = 0
    first = gl.program_id(0)
    for group in range(groups):
        end = gl.minimum(gl.load(ends_ptr + group), M)
        tiles = gl.cdiv(end - start, BLOCK_M) * gl.cdiv(N, BLOCK_N)
        of_group = b_scale_ptr + group * b_scale_lines * b_scale_stride
        for tile in range(first, tiles, gl.num_programs(0)):
            m, n = place_of_tile(tile, end - start, N, BAND, BLOCK_M, BLOCK_N)
            m += start + ME * HALF
            row = m + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
            a_scales = a_scale_ptr + row.to(gl.int64) * a_scale_stride
            total, slot, phase = add_up_steps(
                a_s, b_s, full, free, a_scales, of_group + n // OF_A_BLOCK * b_scale_stride, row < end, nothing,
                slot, phase, K, BY_BLOCKS, OF_A_BLOCK, True, BLOCK_K, ME,
            )  # fmt: skip
            if not BY_BLOCKS:
                column = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
                a_scale = gl.load(a_scales, mask=row < end, other=0).to(gl.float32)
                b_scale = gl.load(of_group + column, mask=column < N, other=0).to(gl.float32)
                total *= a_scale[:, None] * b_scale[None, :]
            rounded = total.to(c_desc.dtype)
            if m + HALF <= end:
                store_columns(c_desc, c_s.index(ME), rounded, m, n, BLOCK_N // STORE_N)
            else:
                store_rows_up_to(c_ptr, c_s.index(ME), rounded, m, n, end, N, c_stride, BLOCK_N // STORE_N, 4)
        first = first_in_next(first, tiles)
        start = end
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_fp8_hopper_kernel(
    a_desc, b_desc, c_desc, c_ptr, a_scale_ptr, b_scale_ptr, ends_ptr,  # [M, K], [groups, N, K], [M, N] twice, scales, [groups]
    M, N, K, groups, c_stride, a_scale_stride, b_scale_lines, b_scale_stride,
    BY_BLOCKS: gl.constexpr, OF_A_BLOCK: gl.constexpr, BAND: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS, 2)
    c_s = gl.allocate_shared_memory(c_desc.dtype, [2] + c_desc.block_type.shape, c_desc.layout)
    gl.warp_specialize(
        [
            (add_up_groups, (
                c_desc, c_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, c_stride,
                a_scale_stride, b_scale_lines, b_scale_stride, BY_BLOCKS, OF_A_BLOCK, BAND, BLOCK_M, BLOCK_N, BLOCK_K, 0,
            )),
            (add_up_groups, (
                c_desc, c_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, c_stride,
                a_scale_stride, b_scale_lines, b_scale_stride, BY_BLOCKS, OF_A_BLOCK, BAND, BLOCK_M, BLOCK_N, BLOCK_K, 1,
            )),
            (load_groups, (
                a_desc, b_desc, ends_ptr, a_s, b_s, full, free, M, N, K, groups, True, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@implements(
    ops.grouped_linear_fp8, backend="gluon", repeat=straight_line, dtypes=OPERANDS, configs=CONFIGS, when=can_move_fp8
)
def grouped_linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str, config: Config
) -> Tensor:
    (M, K), (groups, N, _) = x.shape, weight.shape
    c = empty_rows(M, N, like=x, dtype=result_dtype(weight_scale, dtype))
    by_blocks = weight_scale.ndim == 3
    offsets = offsets.contiguous()
    scales = (x_scale.shape[1], *weight_scale.shape[1:]) if by_blocks else (1, N, 1)
    most_tiles = cdiv(M + groups * (config.m - 1), config.m) * cdiv(N, config.n)
    launch(
        grouped_fp8_hopper_kernel, (min(multiprocessors(c.device), most_tiles),),
        tile_of(in_rows(x), (config.m, K_BYTES)), tile_of(in_rows(weight), (1, config.n, K_BYTES)),
        tile_of(c, (HALF, config.store_n)), c, *contiguous(x_scale, weight_scale), offsets, M, N, K, groups, c.stride(0),
        *scales,
        BY_BLOCKS=by_blocks, OF_A_BLOCK=BLOCK, BAND=config.band, SLOTS=config.slots,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=K_BYTES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return zero_rows_past(c.contiguous(), offsets)
