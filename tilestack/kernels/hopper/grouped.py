"""The grouped product on Hopper in Gluon: one warp loads, the others multiply, as in `matmul.py`, group after group.

    producer   for each group, each of my tiles, each step along K:     TMA brings A and the group's B into the ring
    consumer   for each group, each of my tiles, each step along K:     WGMMA multiplies; a finished tile is stored

Tiles are numbered through all groups, and a program has every 132nd. Both sides walk over the groups in step and find the
first tile of theirs in each by counting on, so nothing has to be looked up:

    tiles of          | group 0      | group 1 | group 3            |         4 programs; program 1 has 1, 5, 9, 13:
                        0  1  2  3  4  5  6  7  8  9 10 11 12 13 14           tiles 1 of group 0, 0 of group 1, …
    program 1             ↑           ↑           ↑           ↑

A tile leaves by TMA where all its rows belong to the group. The last one of a group is stored row by row, for what lies
below is the next group's.

In the gradient of a weight, rows are what is added up over. The last step of a group holds rows of the next one too; the
consumer puts zeros in their place in shared memory before it multiplies, so that not even a NaN gets through.
"""

import functools

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
from tilestack.kernels.hopper import matmul
from tilestack.kernels.hopper.matmul import (
    K_BYTES,
    PRODUCER_REGISTERS,
    WARPS,
    next_in_ring,
    place_of_tile,
    ring_of,
    store_columns,
    tile_of,
)
from tilestack.kernels.matmul.grouped import gradients_by, zero_rows_past
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.matmul.tma import can_move, empty_rows, in_rows, movable
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.ops.autocast import lowered
from tilestack.tuning.model import Gpu, product_us


class Config(matmul.Config):
    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:  # type: ignore[override]
        # As if all groups were one, each of them ending with half a tile that is empty.
        return product_us(rows + groups * self.m // 2, N, K, self.m, self.n, gpu)

    @property
    def warps(self) -> int:
        """Those that multiply; a warp has 16 rows of a tile at least."""
        return min(WARPS, self.m // 16)


CONFIGS = {
    "128x256": Config(128, 256, slots=4, store_n=128),
    "128x128": Config(128, 128, slots=6, store_n=128),
    "64x256": Config(64, 256, slots=4, store_n=128),
    "256x128": Config(256, 128, slots=4, store_n=64),
    "128x256 band 16": Config(128, 256, slots=4, store_n=128, band=16),
}


@gluon.jit
def first_in_next(first, tiles):
    """The number in the next group of my first tile there, given my first tile in this group and how many it has."""
    return first + gl.cdiv(gl.maximum(tiles - first, 0), gl.num_programs(0)) * gl.num_programs(0) - tiles


@gluon.jit
def load_groups(
    a_desc, b_desc, ends_ptr, a_s, b_s, full, free, M, N, K, groups,
    B_TURNED: gl.constexpr, BAND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The producer: every step of every tile of this program, as slots become free."""
    SLOTS: gl.constexpr = a_s.shape[0]
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    start = 0
    first = gl.program_id(0)
    for group in range(groups):
        end = gl.minimum(gl.load(ends_ptr + group), M)
        tiles = gl.cdiv(end - start, BLOCK_M) * gl.cdiv(N, BLOCK_N)
        for tile in range(first, tiles, gl.num_programs(0)):
            m, n = place_of_tile(tile, end - start, N, BAND, BLOCK_M, BLOCK_N)
            for k in range(0, K, BLOCK_K):
                mbarrier.wait(free.index(slot), phase)
                arrived = full.index(slot)
                mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(a_desc, [start + m, k], arrived, a_s.index(slot))
                at = [group, n, k] if B_TURNED else [group, k, n]
                tma.async_copy_global_to_shared(b_desc, at, arrived, b_s.index(slot))
                slot, phase = next_in_ring(slot, phase, SLOTS)
        first = first_in_next(first, tiles)
        start = end


@gluon.jit
def multiply_groups(
    c_desc, c_ptr, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, c_stride,
    B_TURNED: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply what arrives, and store each finished tile."""
    SLOTS: gl.constexpr = a_s.shape[0]
    STORE_N: gl.constexpr = c_s.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    slot = 0
    phase = 0
    last = 0
    start = 0
    first = gl.program_id(0)
    for group in range(groups):
        end = gl.minimum(gl.load(ends_ptr + group), M)
        tiles = gl.cdiv(end - start, BLOCK_M) * gl.cdiv(N, BLOCK_N)
        for tile in range(first, tiles, gl.num_programs(0)):
            m, n = place_of_tile(tile, end - start, N, BAND, BLOCK_M, BLOCK_N)
            total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
            for k in range(0, K, BLOCK_K):
                mbarrier.wait(full.index(slot), phase)
                if B_TURNED:
                    b = b_s.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
                else:
                    b = b_s.index(slot).reshape([BLOCK_K, BLOCK_N])
                total = warpgroup_mma(a_s.index(slot), b, total, use_acc=(k != 0), is_async=True)
                total = warpgroup_mma_wait(
                    num_outstanding=1, deps=(total,)
                )  # the step before is done: its slot is free
                mbarrier.arrive(free.index(last), count=1, pred=(k != 0))
                last = slot
                slot, phase = next_in_ring(slot, phase, SLOTS)
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            mbarrier.arrive(free.index(last), count=1)
            rounded = total.to(c_desc.dtype)
            if start + m + BLOCK_M <= end:
                store_columns(c_desc, c_s, rounded, start + m, n, BLOCK_N // STORE_N)
            else:
                store_rows_up_to(c_ptr, c_s, rounded, start + m, n, end, N, c_stride, BLOCK_N // STORE_N, WARPS)
        first = first_in_next(first, tiles)
        start = end
    tma.store_wait(pendings=0)


@gluon.jit
def store_rows_up_to(c_ptr, c_s, tile, m, n, end, N, c_stride, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Store the rows of a tile that come before `end`, through one buffer, so that whole lines are written."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    if PARTS == 1:
        LANES: gl.constexpr = COLUMNS // 8  # to a row, of 8 elements each
        LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        tma.store_wait(pendings=0)
        c_s.store(tile)
        row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
        column = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))
        place = c_ptr + row.to(gl.int64)[:, None] * c_stride + column[None, :]
        gl.store(place, c_s.load(LINES), mask=(row < end)[:, None] & (column < N)[None, :])
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = tile.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        store_rows_up_to(c_ptr, c_s, left, m, n, end, N, c_stride, PARTS // 2, WARPS)
        store_rows_up_to(c_ptr, c_s, right, m, n + HALF, end, N, c_stride, PARTS // 2, WARPS)


@gluon.jit
def span_of_group(ends_ptr, group, M):
    return gl.load(ends_ptr + group - 1, mask=group > 0, other=0), gl.minimum(gl.load(ends_ptr + group), M)


@gluon.jit
def load_rows(
    grad_desc, x_desc, ends_ptr, a_s, b_s, full, free, M, N, K, groups,
    BAND: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The producer of a weight's gradient: the rows of each tile's group."""
    SLOTS: gl.constexpr = a_s.shape[0]
    of_a_group = gl.cdiv(N, BLOCK_N) * gl.cdiv(K, BLOCK_K)
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), of_a_group * groups, gl.num_programs(0)):
        group = tile // of_a_group
        n, k = place_of_tile(tile % of_a_group, N, K, BAND, BLOCK_N, BLOCK_K)
        start, end = span_of_group(ends_ptr, group, M)
        for m in range(start, end, BLOCK_M):
            mbarrier.wait(free.index(slot), phase)
            arrived = full.index(slot)
            mbarrier.expect(arrived, grad_desc.block_type.nbytes + x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(grad_desc, [m, n], arrived, a_s.index(slot))
            tma.async_copy_global_to_shared(x_desc, [m, k], arrived, b_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def zero_rows_from(tile_s, row, WARPS: gl.constexpr):
    """Zeros in shared memory from this row on."""
    LANES: gl.constexpr = tile_s.shape[1] // 8
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    inside = gl.arange(0, tile_s.shape[0], layout=gl.SliceLayout(1, LINES)) < row
    tile = tile_s.load(LINES)
    tile_s.store(gl.where(inside[:, None], tile, gl.zeros_like(tile)))


@gluon.jit
def add_up_rows(
    dweight_desc, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, BAND: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer of a weight's gradient: all full steps of a group, then the one that is partly another's."""
    SLOTS: gl.constexpr = a_s.shape[0]
    STORE_K: gl.constexpr = c_s.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_K, 16]
    )
    of_a_group = gl.cdiv(N, BLOCK_N) * gl.cdiv(K, BLOCK_K)
    slot = 0
    phase = 0
    last = 0
    for tile in range(gl.program_id(0), of_a_group * groups, gl.num_programs(0)):
        group = tile // of_a_group
        n, k = place_of_tile(tile % of_a_group, N, K, BAND, BLOCK_N, BLOCK_K)
        start, end = span_of_group(ends_ptr, group, M)
        whole = start + (end - start) // BLOCK_M * BLOCK_M
        total = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, LAYOUT)
        for m in range(start, whole, BLOCK_M):
            mbarrier.wait(full.index(slot), phase)
            total = warpgroup_mma(
                a_s.index(slot).permute((1, 0)), b_s.index(slot), total, use_acc=(m != start), is_async=True
            )
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            mbarrier.arrive(free.index(last), count=1, pred=(m != start))
            last = slot
            slot, phase = next_in_ring(slot, phase, SLOTS)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index(last), count=1, pred=(start < whole))
        if whole < end:
            mbarrier.wait(full.index(slot), phase)
            zero_rows_from(a_s.index(slot), end - whole, WARPS)
            zero_rows_from(b_s.index(slot), end - whole, WARPS)
            fence_async_shared()
            total = warpgroup_mma(a_s.index(slot).permute((1, 0)), b_s.index(slot), total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            mbarrier.arrive(free.index(slot), count=1)
            slot, phase = next_in_ring(slot, phase, SLOTS)
        store_columns(dweight_desc, c_s, total.to(dweight_desc.dtype), n, k, BLOCK_K // STORE_K, group)
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_hopper_fwd_kernel(
    a_desc, b_desc, c_desc, c_ptr, ends_ptr,  # tiles of [M, K], [groups, K, N] and [M, N]; [M, N]; [groups]
    M, N, K, groups, c_stride,
    B_TURNED: gl.constexpr, BAND: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS)
    c_s = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    gl.warp_specialize(
        [
            (multiply_groups, (
                c_desc, c_ptr, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, c_stride,
                B_TURNED, BAND, BLOCK_M, BLOCK_N, BLOCK_K, WARPS,
            )),
            (load_groups, (
                a_desc, b_desc, ends_ptr, a_s, b_s, full, free, M, N, K, groups,
                B_TURNED, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def grouped_hopper_bwd_kernel(
    grad_desc, x_desc, dweight_desc, ends_ptr,  # tiles of [M, N], [M, K] and [groups, N, K]; [groups]
    M, N, K, groups,
    BAND: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(grad_desc, x_desc, SLOTS)
    c_s = gl.allocate_shared_memory(dweight_desc.dtype, dweight_desc.block_type.shape, dweight_desc.layout)
    gl.warp_specialize(
        [
            (add_up_rows, (
                dweight_desc, ends_ptr, a_s, b_s, c_s, full, free, M, N, K, groups, BAND, BLOCK_N, BLOCK_K, BLOCK_M, WARPS,
            )),
            (load_rows, (
                grad_desc, x_desc, ends_ptr, a_s, b_s, full, free, M, N, K, groups, BAND, BLOCK_N, BLOCK_K, BLOCK_M,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor, config: Config) -> Tensor:
    """a[rows of group g] @ b[g] for operands of any strides; zero in rows of no group."""
    (M, K), (groups, _, N) = a.shape, b.shape
    c = empty_rows(M, N, like=a)
    if 0 in (M, N, K):
        return c.contiguous().zero_()
    offsets = offsets.contiguous()
    a, (b, b_turned) = in_rows(a), movable(b)
    step = K_BYTES // a.element_size()
    most_tiles = cdiv(M + groups * (config.m - 1), config.m) * cdiv(N, config.n)
    launch(
        grouped_hopper_fwd_kernel, (min(multiprocessors(c.device), most_tiles),),
        tile_of(a, (config.m, step)), tile_of(b, (1, config.n, step) if b_turned else (1, step, config.n)),
        tile_of(c, (config.m, config.store_n)), c, offsets, M, N, K, groups, c.stride(0),
        B_TURNED=b_turned, BAND=config.band, SLOTS=config.slots, BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=step,
        WARPS=config.warps, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=config.warps,
    )  # fmt: skip
    return zero_rows_past(c.contiguous(), offsets)


def gradient_of_weight(grad: Tensor, x: Tensor, offsets: Tensor, config: Config) -> Tensor:
    """grad[rows of group g].T @ x[rows of group g], zero for a group without rows."""
    (M, N), K, groups = grad.shape, x.shape[1], offsets.shape[0]
    dweight = empty_rows(groups, N, K, like=x)
    if 0 in (M, N, K):
        return dweight.contiguous().zero_()
    step = K_BYTES // x.element_size()
    tiles = groups * cdiv(N, config.m) * cdiv(K, config.n)
    launch(
        grouped_hopper_bwd_kernel, (min(multiprocessors(x.device), tiles),),
        tile_of(in_rows(grad), (step, config.m)), tile_of(in_rows(x), (step, config.n)),
        tile_of(dweight, (1, config.m, config.store_n)), offsets.contiguous(), M, N, K, groups,
        BAND=config.band, SLOTS=config.slots, BLOCK_N=config.m, BLOCK_K=config.n, BLOCK_M=step,
        WARPS=config.warps, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=config.warps,
    )  # fmt: skip
    return dweight.contiguous()


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, needs: tuple[bool, bool, bool], config: Config
) -> tuple[Tensor | None, Tensor | None, None]:
    product = functools.partial(grouped_product, config=config)
    weight_product = functools.partial(gradient_of_weight, config=config)
    return gradients_by(product, weight_product, grad, x, weight, offsets, needs)


@implements(
    ops.grouped_linear,
    backend="gluon",
    repeat=straight_line,
    backward=grouped_linear_backward,
    when=can_move,
    dtypes=HALVES,
    configs=CONFIGS,
)
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, config: Config) -> Tensor:
    x, weight = lowered(x, weight)
    return grouped_product(x, weight.mT, offsets, config)
