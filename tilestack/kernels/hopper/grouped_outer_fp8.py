"""The gradient of grouped weights from fp8 codes on Hopper in Gluon: sums over the rows of each group.

    out[g][n, k] = Σ_{m in group g} left_scale[n, block of m] · right_scale[block of k, block of m] · left[n, m] · right[k, m]

Both operands come turned, as `fp8_tiles` writes them, so that the rows that are added up lie side by side: WGMMA takes fp8
in no other way. Tiles of all groups are numbered through, and a program has every 132nd:

    producer       1 warp    for each of my tiles, each block of 128 rows that its group has a part of: TMA brings the
                             block's codes of 128 lines of left and of right into the ring
    lines  0 … 63  4 warps   multiply a slot, scale what came out, and add it to a sum in float32, as in `fp8.py`
    lines 64 …127  4 warps   the same

Scales are of blocks counted from the first row, wherever groups begin, so steps are these blocks too:

    rows              0        128        256        384        512
    scales            |    0    |    1     |    2     |    3     |
    group 1 of 3           ├────────────────────┤                        all of step 1, parts of 0 and 2

The first and the last block of a group may hold rows of its neighbours, or of no group. TMA cannot leave them out: its
bounds are the matrix's own, and where groups end only the GPU knows. So they arrive, and before such a block is multiplied
zeros take their place in shared memory. In both operands: zeros in one would do for numbers, but the other's NaN would
still get through. Each consumer does so in its own half of left and in half of right, which both read, so at such a block
they wait for each other once. A group without rows has no steps, not even the block it lies in the middle of, whose scale
need not be finite; its tiles are stored as the zeros that their sums start from.
"""

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
from tilestack.kernels.hopper import scaled
from tilestack.kernels.hopper.fp8 import CONSUMER_REGISTERS, HALF, can_move_fp8
from tilestack.kernels.hopper.grouped import span_of_group
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    next_in_ring,
    place_of_tile,
    ring_of,
    store_columns,
    tile_of,
)
from tilestack.kernels.matmul.tma import empty_rows, in_rows
from tilestack.kernels.quantised.grouped_fp8 import OUTER_OPERANDS
from tilestack.kernels.quantised.scaled import contiguous
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.ops.quantised_linear import BLOCK, result_dtype
from tilestack.tuning.model import Gpu

assert K_BYTES == BLOCK  # a step is a block of rows that share their scales


class Config(scaled.Config):
    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:  # type: ignore[override]
        # Each group begins and ends amid a block, on average.
        return super().model_us(N * groups, K, cdiv(rows, max(groups, 1)) + BLOCK, gpu)


CONFIGS = {
    "128x128": Config(2 * HALF, 128, slots=5, store_n=128),
    "128x128 band 16": Config(2 * HALF, 128, slots=5, store_n=128, band=16),
    "128x64": Config(2 * HALF, 64, slots=8, store_n=64),
}


@gluon.jit
def tile_of_group(tile, ends_ptr, M, N, K, BAND: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """The group of a tile, its first line of left and of right, and the group's rows from `start` to `end`."""
    of_a_group = gl.cdiv(N, BLOCK_N) * gl.cdiv(K, BLOCK_K)
    group = tile // of_a_group
    n, k = place_of_tile(tile % of_a_group, N, K, BAND, BLOCK_N, BLOCK_K)
    start, end = span_of_group(ends_ptr, group, M)
    return group, n, k, start, end


@gluon.jit
def first_block(start, end, BLOCK_M: gl.constexpr):
    """Where the steps of a group begin: with the block of its first row, or nowhere."""
    return gl.where(start < end, start // BLOCK_M * BLOCK_M, end)


@gluon.jit
def load_blocks(
    left_desc, right_desc, ends_ptr, left_s, right_s, full, free, M, N, K, groups,
    BAND: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The producer: every block of rows of every tile of this program, as slots become free."""
    SLOTS: gl.constexpr = left_s.shape[0]
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N) * gl.cdiv(K, BLOCK_K) * groups, gl.num_programs(0)):
        _, n, k, start, end = tile_of_group(tile, ends_ptr, M, N, K, BAND, BLOCK_N, BLOCK_K)
        for m in range(first_block(start, end, BLOCK_M), end, BLOCK_M):
            mbarrier.wait(free.index(slot), phase)
            arrived = full.index(slot)
            mbarrier.expect(arrived, left_desc.block_type.nbytes + right_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(left_desc, [n, m], arrived, left_s.index(slot))
            tma.async_copy_global_to_shared(right_desc, [k, m], arrived, right_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def zero_codes_outside(lines_s, start, end):
    """Zeros in shared memory for the codes of each line that come before `start`, and from `end` on."""
    LANES: gl.constexpr = lines_s.shape[1] // 16  # to a line, of 16 codes each
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    place = gl.arange(0, lines_s.shape[1], layout=gl.SliceLayout(0, LINES))
    codes = lines_s.load(LINES)
    lines_s.store(gl.where(((place >= start) & (place < end))[None, :], codes, gl.zeros_like(codes)))


@gluon.jit
def add_up_rows_of_groups(
    out_desc, left_scale_ptr, right_scale_ptr, ends_ptr, left_s, right_s, out_s, full, free, zeroed, M, N, K, groups, blocks,
    BAND: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """A consumer: its half of the lines of each tile, a block of rows at a time."""
    SLOTS: gl.constexpr = left_s.shape[0]
    STORE_K: gl.constexpr = out_s.shape[3]
    HALF: gl.constexpr = BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 32]
    )
    nothing = gl.zeros((HALF, BLOCK_K), gl.float32, LAYOUT)
    slot = 0
    phase = 0
    zeroed_phase = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N) * gl.cdiv(K, BLOCK_K) * groups, gl.num_programs(0)):
        group, n, k, start, end = tile_of_group(tile, ends_ptr, M, N, K, BAND, BLOCK_N, BLOCK_K)
        n += ME * HALF
        line = n + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        left_scales = left_scale_ptr + line.to(gl.int64) * blocks
        right_scales = right_scale_ptr + k // BLOCK_M * blocks
        total = nothing
        for m in range(first_block(start, end, BLOCK_M), end, BLOCK_M):
            left_scale = gl.load(left_scales + m // BLOCK_M, mask=line < N, other=0).to(gl.float32)
            right_scale = gl.load(right_scales + m // BLOCK_M).to(gl.float32)
            mbarrier.wait(full.index(slot), phase)
            left = left_s.index(slot).slice(ME * HALF, HALF, 0)
            right = right_s.index(slot)
            if (m < start) | (m + BLOCK_M > end):
                zero_codes_outside(left, start - m, end - m)
                zero_codes_outside(right.slice(ME * (BLOCK_K // 2), BLOCK_K // 2, 0), start - m, end - m)
                fence_async_shared()
                mbarrier.arrive(zeroed, count=1)
                mbarrier.wait(zeroed, zeroed_phase)
                zeroed_phase ^= 1
            part = warpgroup_mma(left, right.permute((1, 0)), nothing, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(free.index(slot), count=1)
            slot, phase = next_in_ring(slot, phase, SLOTS)
            total += part * (left_scale * right_scale)[:, None]
        store_columns(out_desc, out_s.index(ME), total.to(out_desc.dtype), n, k, BLOCK_K // STORE_K, group)
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_outer_fp8_hopper_kernel(
    left_desc, right_desc, out_desc, left_scale_ptr, right_scale_ptr, ends_ptr,  # [N, M], [K, M], [groups, N, K], scales, [groups]
    M, N, K, groups, blocks,
    BAND: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    left_s, right_s, full, free = ring_of(left_desc, right_desc, SLOTS, 2)
    zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(zeroed, count=2)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    gl.warp_specialize(
        [
            (add_up_rows_of_groups, (
                out_desc, left_scale_ptr, right_scale_ptr, ends_ptr, left_s, right_s, out_s, full, free, zeroed,
                M, N, K, groups, blocks, BAND, BLOCK_N, BLOCK_K, BLOCK_M, 0,
            )),
            (add_up_rows_of_groups, (
                out_desc, left_scale_ptr, right_scale_ptr, ends_ptr, left_s, right_s, out_s, full, free, zeroed,
                M, N, K, groups, blocks, BAND, BLOCK_N, BLOCK_K, BLOCK_M, 1,
            )),
            (load_blocks, (
                left_desc, right_desc, ends_ptr, left_s, right_s, full, free, M, N, K, groups,
                BAND, BLOCK_N, BLOCK_K, BLOCK_M,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def can_move_outer(left: Tensor, right: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str) -> bool | str:
    return can_move_fp8(left, right, right_scale, dtype) if len(offsets) else "there is no group"


@implements(
    ops.grouped_outer_fp8,
    backend="gluon",
    repeat=straight_line,
    dtypes=OUTER_OPERANDS,
    configs=CONFIGS,
    when=can_move_outer,
)
def grouped_outer_fp8(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str, config: Config
) -> Tensor:
    (N, M), K, groups = left.shape, right.shape[0], len(offsets)
    out = empty_rows(groups, N, K, like=left, dtype=result_dtype(right_scale, dtype))
    tiles = groups * cdiv(N, config.m) * cdiv(K, config.n)
    launch(
        grouped_outer_fp8_hopper_kernel, (min(multiprocessors(out.device), tiles),),
        tile_of(in_rows(left), (config.m, BLOCK)), tile_of(in_rows(right), (config.n, BLOCK)),
        tile_of(out, (1, HALF, config.store_n)), *contiguous(left_scale, right_scale, offsets),
        M, N, K, groups, left_scale.shape[1],
        BAND=config.band, SLOTS=config.slots, BLOCK_N=config.m, BLOCK_K=config.n, BLOCK_M=BLOCK,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out.contiguous()
