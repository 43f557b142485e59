"""Top rung of the ladder of products, for Hopper in Gluon: one warp that only loads, eight that only multiply.

    producer   1 warp    TMA brings the tiles of A and B of the next steps into a ring of SLOTS in shared memory
    consumer   8 warps   WGMMA multiplies each slot's tiles as they arrive, straight from shared memory

             full: the bytes of a slot have come                       free: its product is done
    producer ──────────────────────────────────▶ consumer ──────────────────────────────────▶ producer

    slots      | 0 | 1 | 2 | 3 |     the producer is up to SLOTS steps ahead, also over the end of a tile: while the
                 ↑ multiplied  ↑     consumer finishes one, the next one's A and B are on their way
                       loading

Each program walks over the tiles of C in bands (`ordered.py`), as many programs as multiprocessors. Over the rung below
it gains that neither side executes the other's instructions, and that one step's product is queued before the last one's
is done, so the tensor cores never wait for an issue. The result leaves through shared memory too, half a tile at a time,
so that the ring can have a slot more; TMA writes it while the next tile is multiplied.
"""

import functools
from typing import Any, NamedTuple

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
from tilestack.contract import implements
from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.products import HALVES, linear_by, linear_gradients_by
from tilestack.kernels.matmul.tma import can_move, empty_rows, movable
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.tuning.model import Gpu, product_us

K_BYTES = 128  # of a step along K: a row of a tile is what one swizzled line of shared memory holds
WARPS = 8  # that multiply
PRODUCER_REGISTERS = 24  # of a thread; the consumers get the rest


class Config(NamedTuple):
    """A tile of C, the slots of the ring, the columns that leave at a time, and how many tiles high a band is."""

    m: int
    n: int
    slots: int
    store_n: int
    band: int = 8

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        return product_us(M, N, K, self.m, self.n, gpu)


CONFIGS = {
    "128x256": Config(128, 256, slots=4, store_n=128),
    "128x256 whole store": Config(128, 256, slots=3, store_n=256),
    "128x128": Config(128, 128, slots=6, store_n=128),
    "128x64": Config(128, 64, slots=8, store_n=64),
    "256x128": Config(256, 128, slots=4, store_n=64),
    "128x256 band 16": Config(128, 256, slots=4, store_n=128, band=16),
}


@gluon.jit
def place_of_tile(number, M, N, BAND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row and column of the tile with this number, in bands; see `ordered.py`."""
    of_a_band = BAND * gl.cdiv(N, BLOCK_N)
    first = number // of_a_band * BAND
    height = gl.minimum(gl.cdiv(M, BLOCK_M) - first, BAND)
    within = number % of_a_band
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@gluon.jit
def next_in_ring(slot, phase, SLOTS: gl.constexpr):
    wraps = slot + 1 == SLOTS
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def load_tiles(
    a_desc, b_desc, a_s, b_s, full, free, M, N, K,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The producer: every step of every tile of this program, as slots become free."""
    SLOTS: gl.constexpr = a_s.shape[0]
    slot = 0
    phase = 1  # a barrier that nobody has used lets the first round pass
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = place_of_tile(tile, M, N, BAND, BLOCK_M, BLOCK_N)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(slot), phase)
            arrived = full.index(slot)
            mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [k, m] if A_TURNED else [m, k], arrived, a_s.index(slot))
            tma.async_copy_global_to_shared(b_desc, [n, k] if B_TURNED else [k, n], arrived, b_s.index(slot))
            slot, phase = next_in_ring(slot, phase, SLOTS)


@gluon.jit
def multiply_tiles(
    c_desc, bias_ptr, a_s, b_s, c_s, full, free, M, N, K,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, HAS_BIAS: gl.constexpr, BAND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply what arrives, and hand each finished tile to TMA."""
    SLOTS: gl.constexpr = a_s.shape[0]
    STORE_N: gl.constexpr = c_s.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    slot = 0
    phase = 0
    last = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = place_of_tile(tile, M, N, BAND, BLOCK_M, BLOCK_N)
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
        store_columns(c_desc, c_s, total.to(c_desc.dtype), m, n, BLOCK_N // STORE_N)
    tma.store_wait(pendings=0)


@gluon.jit
def store_columns(c_desc, c_s, tile, m, n, PARTS: gl.constexpr, matrix=None):
    """Store a tile through one buffer, in 1, 2 or 4 parts of its columns; the last is still on its way on return.

    Where c is a stack, `matrix` is the number of the one to store to.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    if PARTS == 1:
        tma.store_wait(pendings=0)
        if matrix is None:
            c_s.store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(c_desc, [m, n], c_s)
        else:
            c_s.reshape([ROWS, COLUMNS]).store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(c_desc, [matrix, m, n], c_s)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = tile.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        store_columns(c_desc, c_s, left, m, n, PARTS // 2, matrix)
        store_columns(c_desc, c_s, right, m, n + HALF, PARTS // 2, matrix)


@gluon.jit
def ring_of(a_desc, b_desc, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr = 1):
    """Shared memory for the tiles of SLOTS steps, and the barriers that say which of them are full and which free: when
    each of the consumers has said so."""
    a_s = gl.allocate_shared_memory(a_desc.dtype, [SLOTS] + a_desc.block_type.shape, a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [SLOTS] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)
    return a_s, b_s, full, free


@gluon.jit
def matmul_hopper_kernel(
    a_desc, b_desc, c_desc, bias_ptr,  # tiles of [M, K], [K, N] and [M, N]; [N] or None
    M, N, K,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, BAND: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_s, b_s, full, free = ring_of(a_desc, b_desc, SLOTS)
    c_s = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    gl.warp_specialize(
        [
            (multiply_tiles, (
                c_desc, bias_ptr if HAS_BIAS else 0, a_s, b_s, c_s, full, free, M, N, K, A_TURNED, B_TURNED, HAS_BIAS,
                BAND, BLOCK_M, BLOCK_N, BLOCK_K, WARPS,
            )),
            (load_tiles, (
                a_desc, b_desc, a_s, b_s, full, free, M, N, K, A_TURNED, B_TURNED, BAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    name = "float8e4nv" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, name))


def tile_of(matrix: Tensor, block: tuple[int, ...]) -> Tile:
    return Tile.of(matrix, block, layout_of(block, matrix.dtype))


def hopper_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """a @ b + bias for matrices of any strides; those that TMA cannot move are copied."""
    (M, K), N = a.shape, b.shape[1]
    c = empty_rows(M, N, like=a)
    if 0 in (M, N, K):
        return (
            c.contiguous().zero_()
        )  # TMA moves no empty matrix; only a gradient, without a bias, adds up over nothing
    bias = None if bias is None else bias.contiguous()
    step = K_BYTES // a.element_size()
    (a, a_turned), (b, b_turned) = movable(a), movable(b)
    programs = min(multiprocessors(c.device), cdiv(M, config.m) * cdiv(N, config.n))
    launch(
        matmul_hopper_kernel, (programs,),
        tile_of(a, (step, config.m) if a_turned else (config.m, step)),
        tile_of(b, (config.n, step) if b_turned else (step, config.n)),
        tile_of(c, (config.m, config.store_n)), bias, M, N, K,
        A_TURNED=a_turned, B_TURNED=b_turned, BAND=config.band, SLOTS=config.slots,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=step,
        WARPS=WARPS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return c.contiguous()


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], config: Config
) -> tuple[Tensor | None, ...]:
    return linear_gradients_by(functools.partial(hopper_product, config=config), grad, x, weight, bias, needs)


@implements(
    ops.linear,
    backend="gluon",
    repeat=straight_line,
    backward=linear_backward,
    when=can_move,
    dtypes=HALVES,
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(functools.partial(hopper_product, config=config), x, weight, bias)
