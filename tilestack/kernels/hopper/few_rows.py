"""A linear layer of up to 64 rows for Hopper, in Gluon: the weight is what fills the tensor cores, and all that is read.

    outᵀ = weight · xᵀ       [N, M] = [N, K] · [K, M]

Tensor cores of Hopper multiply 64 rows at a time with 8 to 256 columns. In decoding x has 1 to 64 rows, so it takes the
side of the columns, where no more of it is multiplied than there is, and rows of the weight fill the other:

                 K: part 0 | part 1        A program has WIDTH rows of the weight and a part of K. TMA brings them, a step
    weight   +------+------+------+----    of BLOCK_K at a time with the same columns of x, into a ring of SLOTS steps in
     WIDTH   |  →   |  →   |  →   |  →     shared memory, all asked for at the start; when a step is multiplied, its slot
             +------+------+------+----    is given to the step SLOTS further on. Where the weight has fewer tiles than
                                           the GPU has room for programs, PARTS programs share a tile's sum along K.

What takes the time is reading the weight, so what counts is how many bytes are on their way, from the first moment to the
last. The first steps' weights are asked for while the kernel in front still computes x (kernels/early.py), and where a ring
takes less than half of the shared memory, two programs share a multiprocessor: the next kernel's are already there.

The parts of a tile are added up as in matmul/split_k.py, by whoever comes last and always in the same order: the same bits
in every run. All parts are loaded at once, for a chain of loads would cost more than the product itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.contract.workspace import workspace
from tilestack.kernels.early import early
from tilestack.kernels.hopper.matmul import next_in_ring, tile_of
from tilestack.kernels.matmul.pipelined import linear_backward
from tilestack.kernels.matmul.products import HALVES, has_at_most, linear_by
from tilestack.kernels.matmul.tma import ALIGNMENT, can_move, in_rows
from tilestack.kernels.tiles import cdiv, multiprocessors, next_power
from tilestack.tuning.model import Gpu, product_us

try:
    from triton.experimental.gluon.language import barrier as meet
except ImportError:  # its name before Triton 3.7
    from triton.experimental.gluon.language import thread_barrier as meet

MOST_ROWS = 64  # of x; of more, cuBLAS was faster on an H200 in nearly every layer
WIDTH, WARPS = 64, 4  # rows of the weight to a tile, 16 to a warp
LEAST_ROWS, LARGEST_ROWS = 8, 128  # of a tile of x; 8 are the fewest columns of a warpgroup's instruction
SHARED_MEMORY = 228 * 1024  # of a multiprocessor
SET_ASIDE = 3 * 1024  # of each program's share: what the GPU keeps for itself, and barriers
LEAST_STEP = 64  # a line of shared memory
LEAST_SLOTS, MOST_SLOTS = 3, 16
ITEM_BYTES = gl.constexpr(2)  # of float16 and bfloat16


class Plan(NamedTuple):
    """How a product is shared out: rows of a tile of x, tiles, parts of each one's sum along K, steps of a part and their
    length, slots of the ring, programs, whether one has more steps than slots, and whether it keeps all of x."""

    rows: int
    tiles: int
    parts: int
    steps: int
    k: int
    slots: int
    programs: int
    refills: bool
    keeps_x: bool


class Config(NamedTuple):
    """The longest step along K, programs to a multiprocessor, the most parts of a sum, and whether a program of several
    tiles keeps all of x in shared memory if there is room."""

    k: int
    resident: int
    parts: int = 16
    keeps_x: bool = False

    def plan(self, M: int, N: int, K: int, multiprocessors: int) -> Plan:
        rows = max(min(next_power(M), LARGEST_ROWS), LEAST_ROWS)
        tiles, room = cdiv(N, WIDTH) * cdiv(M, rows), multiprocessors * self.resident
        elements = (SHARED_MEMORY // self.resident - SET_ASIDE) // ITEM_BYTES.value
        elements -= WIDTH * rows  # a tile on its way out of the registers
        beside_x = elements - rows * cdiv(K, self.k) * self.k
        slots_beside_x = beside_x // (WIDTH * LEAST_STEP)
        keeps_x = self.keeps_x and rows >= M and tiles > room and slots_beside_x >= LEAST_SLOTS
        ring, height = (beside_x, WIDTH) if keeps_x else (elements, WIDTH + rows)
        k = self.k
        while k > LEAST_STEP and ring // (height * k) < LEAST_SLOTS:
            k //= 2
        parts = max(min(room // tiles, self.parts, cdiv(K, k)), 1)
        steps = cdiv(cdiv(K, k), parts)
        parts = cdiv(cdiv(K, k), steps)  # none is empty
        programs = min(tiles * parts, room)
        of_a_program = steps * cdiv(tiles * parts, programs)
        slots = min(ring // (height * k), of_a_program, MOST_SLOTS)
        return Plan(rows, tiles, parts, steps, k, slots, programs, slots < of_a_program, keeps_x)

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        plan = self.plan(M, N, K, gpu.multiprocessors)
        return product_us(M, N, K, plan.rows, WIDTH, gpu, plan.parts)


CONFIGS = {
    "64x256": Config(256, resident=1),
    "64x128 kept": Config(128, resident=1, parts=1, keeps_x=True),
    "64x128 whole": Config(128, resident=2, parts=1),
}


@gluon.jit
def wait_for_last(EARLY: gl.constexpr):
    """As in kernels/early.py, in Gluon."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def fetch_weights(weight_ptr, first, k, N, K, stride, LENGTH: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Have LENGTH elements from column k on of WIDTH rows brought into the L2 cache, each by one thread or two; of rows
    beyond the last that one again, and nothing beyond K."""
    PIECES: gl.constexpr = 32 * WARPS // WIDTH
    PIECE: gl.constexpr = LENGTH // PIECES
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = gl.minimum(first + thread // PIECES, N - 1).to(gl.int64)
    start = k + thread % PIECES * PIECE
    size = gl.minimum(gl.maximum(K - start, 0), PIECE) * ITEM_BYTES
    gl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [weight_ptr + row * stride + start, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def place_of_item(item, M, STEPS, PARTS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """Number of the tile, its first rows of the weight and of x, the part of its sum and that one's first step. Tiles that
    share rows of the weight are neighbours."""
    tile = item // PARTS
    across = gl.cdiv(M, ROWS)
    part = item % PARTS
    return tile, tile // across * WIDTH, tile % across * ROWS, part, part * STEPS


@gluon.jit
def load_next_step(
    weight_desc, x_desc, weight_s, x_s, full, slot, item, done, wanted, M, ITEMS, STEPS,
    PARTS: gl.constexpr, KEEPS_X: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Where wanted, ask for the step after so many of an item, and answer which one follows: of this program's next item
    after the last. Nothing is loaded of items that there are not."""
    _, n, m, _, first = place_of_item(item, M, STEPS, PARTS, WIDTH, ROWS)
    exists = wanted & (item < ITEMS)
    arrived = full.index(slot)
    k = (first + done) * BLOCK_K
    BYTES: gl.constexpr = weight_desc.block_type.nbytes + (0 if KEEPS_X else x_desc.block_type.nbytes)
    mbarrier.expect(arrived, BYTES, pred=exists)
    tma.async_copy_global_to_shared(weight_desc, [n, k], arrived, weight_s.index(slot), pred=exists)
    if not KEEPS_X:
        tma.async_copy_global_to_shared(x_desc, [m, k], arrived, x_s.index(slot), pred=exists)
    over = done + 1 == STEPS
    following_item = gl.where(wanted & over, item + gl.num_programs(0), item)
    following_done = gl.where(wanted, gl.where(over, 0, done + 1), done)
    return following_item, following_done


@gluon.jit
def is_last_part(places, total, count_ptr, PARTS: gl.constexpr):
    """Leave a partial sum, count it, and answer whether all others of its tile are there; the last sets the count back."""
    gl.store(places, total)
    meet()  # all threads have stored before one of them counts
    before = gl.atomic_add(count_ptr, 1, sem="acq_rel")
    meet()
    is_last = before == PARTS - 1
    if is_last:
        gl.store(count_ptr, 0)
    return is_last


@gluon.jit
def sum_of_parts(places, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """The partial sums of a tile in their order, all of them asked for at once."""
    total = gl.load(places, cache_modifier=".cg")
    for part in gl.static_range(1, PARTS):
        total += gl.load(places + part * SIZE, cache_modifier=".cg")
    return total


@gluon.jit
def store_turned(total, bias_ptr, out_ptr, n, m, M, N, FROM: gl.constexpr, HAS_BIAS: gl.constexpr, WARPS: gl.constexpr):
    """Store a tile of outᵀ [WIDTH, ROWS], in the layout FROM, to out [M, N]: eight neighbours of a row from each thread."""
    WIDTH: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, WARPS], [0, 1])
    if HAS_BIAS:
        column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, FROM))
        total += gl.load(bias_ptr + column, mask=column < N, other=0).to(gl.float32)[:, None]
    tile = gl.convert_layout(total.to(out_ptr.dtype.element_ty), LAYOUT)
    column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAYOUT))
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    places = out_ptr + row.to(gl.int64)[None, :] * N + column[:, None]
    gl.store(places, tile, mask=(row < M)[None, :] & (column < N)[:, None])


@gluon.jit
def linear_few_rows_kernel(
    weight_desc, x_desc, weight_ptr, bias_ptr,  # tiles of [N, K] and [M, K]; [N, K], [N] or None
    parts_ptr, counts_ptr, out_ptr,  # [tiles, PARTS, WIDTH, ROWS] and [tiles] or None, [M, N]
    M, N, K, stride, ITEMS, STEPS,
    EARLY: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, REFILLS: gl.constexpr, X_SLOTS: gl.constexpr,
    AHEAD: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    KEEPS_X: gl.constexpr = X_SLOTS > 0
    item = gl.program_id(0)
    if EARLY:
        _, n, _, _, first = place_of_item(item, M, STEPS, PARTS, WIDTH, ROWS)
        fetch_weights(weight_ptr, n, first * BLOCK_K, N, K, stride, AHEAD * BLOCK_K, WIDTH, WARPS)
    weight_s = gl.allocate_shared_memory(weight_desc.dtype, [SLOTS, WIDTH, BLOCK_K], weight_desc.layout)
    x_s = gl.allocate_shared_memory(x_desc.dtype, [X_SLOTS if KEEPS_X else SLOTS, ROWS, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    mbarrier.init(x_full.index(0), count=1)
    meet()
    wait_for_last(EARLY)

    ahead = item
    ahead_done = item * 0
    for slot in gl.static_range(SLOTS):
        ahead, ahead_done = load_next_step(
            weight_desc, x_desc, weight_s, x_s, full, slot, ahead, ahead_done, item >= 0, M, ITEMS, STEPS,
            PARTS, KEEPS_X, WIDTH, ROWS, BLOCK_K,
        )  # fmt: skip
    if KEEPS_X:
        mbarrier.expect(x_full.index(0), X_SLOTS * x_desc.block_type.nbytes)
        for step in range(X_SLOTS):
            tma.async_copy_global_to_shared(x_desc, [0, step * BLOCK_K], x_full.index(0), x_s.index(step))
        mbarrier.wait(x_full.index(0), 0)

    gl.assume(STEPS > 0)
    slot = 0
    phase = 0
    last = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        total = gl.zeros((WIDTH, ROWS), gl.float32, LAYOUT)
        for done in range(STEPS):
            mbarrier.wait(full.index(slot), phase)
            x = x_s.index(done if KEEPS_X else slot).permute((1, 0))
            total = warpgroup_mma(weight_s.index(slot), x, total, use_acc=(done != 0), is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            if REFILLS:
                meet()  # all warps have multiplied the step before: its slot is free
                ahead, ahead_done = load_next_step(
                    weight_desc, x_desc, weight_s, x_s, full, last, ahead, ahead_done, done != 0, M, ITEMS, STEPS,
                    PARTS, KEEPS_X, WIDTH, ROWS, BLOCK_K,
                )  # fmt: skip
            last = slot
            slot, phase = next_in_ring(slot, phase, SLOTS)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        if REFILLS:
            meet()
            ahead, ahead_done = load_next_step(
                weight_desc, x_desc, weight_s, x_s, full, last, ahead, ahead_done, item >= 0, M, ITEMS, STEPS,
                PARTS, KEEPS_X, WIDTH, ROWS, BLOCK_K,
            )  # fmt: skip
        tile, n, m, part, _ = place_of_item(item, M, STEPS, PARTS, WIDTH, ROWS)
        if PARTS == 1:
            store_turned(total, bias_ptr, out_ptr, n, m, M, N, LAYOUT, HAS_BIAS, WARPS)
        else:
            row = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAYOUT))
            column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
            places = parts_ptr + tile * (PARTS * WIDTH * ROWS) + row[:, None] * ROWS + column[None, :]
            if is_last_part(places + part * (WIDTH * ROWS), total, counts_ptr + tile, PARTS):
                total = sum_of_parts(places, WIDTH * ROWS, PARTS)
                store_turned(total, bias_ptr, out_ptr, n, m, M, N, LAYOUT, HAS_BIAS, WARPS)


def few_rows_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """a @ b + bias for few rows of a; b is a weight's transpose, whose columns TMA moves."""
    (M, K), N = a.shape, b.shape[1]
    x, weight = in_rows(a), in_rows(b.T)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    plan = config.plan(M, N, K, multiprocessors(a.device))
    parts = counts = None
    if plan.parts > 1:
        parts = torch.empty((plan.tiles, plan.parts, WIDTH, plan.rows), dtype=torch.float32, device=a.device)
        counts = workspace("few_rows_counts", (plan.tiles,), torch.int32, a.device)
    launch(
        linear_few_rows_kernel, (plan.programs,),
        tile_of(weight, (WIDTH, plan.k)), tile_of(x, (plan.rows, plan.k)),
        weight, None if bias is None else bias.contiguous(), parts, counts, out,
        M, N, K, weight.stride(0), plan.tiles * plan.parts, plan.steps,
        PARTS=plan.parts, SLOTS=plan.slots, REFILLS=plan.refills, X_SLOTS=plan.steps if plan.keeps_x else 0,
        AHEAD=min(plan.slots, plan.steps), WIDTH=WIDTH, ROWS=plan.rows, BLOCK_K=plan.k,
        WARPS=WARPS, num_warps=WARPS, **early(a),
    )  # fmt: skip
    return out


def takes(x: Tensor, weight: Tensor) -> bool | str:
    apart, side_by_side = weight.stride()
    in_place = side_by_side == 1 and apart * weight.element_size() % ALIGNMENT == 0 and apart >= weight.shape[1]
    if not in_place:
        return "TMA moves a weight whose rows are contiguous and start on 16 bytes; this one it would have to copy"
    rows = has_at_most(MOST_ROWS, x)
    return can_move(x, weight) if rows is True else rows


@implements(
    ops.linear,
    backend="gluon_few_rows",
    repeat=straight_line,
    backward=linear_backward,
    when=takes,
    dtypes=HALVES,
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(lambda a, b, c: few_rows_product(a, b, c, config), x, weight, bias)
