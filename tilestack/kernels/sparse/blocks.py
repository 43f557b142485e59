"""Products with matrices of blocks: a program for each tile of a dense result, or for each block of a sparse one.

    S            x              out
    +--+--+--+   +-----+        +-----+      line 1 has the blocks (1, 0) and (1, 2): its tile of the result is
    |  |  |  |   |     |        |     |      block (1, 0) times rows 0 of x plus block (1, 2) times rows 2 of x.
    +--+--+--+ × +-----+   =    +-----+      Absent blocks cost nothing, not even a look: blocks are sorted by line on
    |■ |  |■ |   |     |        |  ■  |      the device, and offsets say where each line's begin.
    +--+--+--+   +-----+        +-----+

A step along a line is a block or a part of one. Which block comes next is asked for a step ahead, so that the addresses of
its tiles are known when they are wanted, and the tiles of several steps are on their way at the same time.

Sorting is by counting: there is a program for each line, which looks at where all blocks lie. That is one launch, and for
some thousand blocks it takes less than a sort; for very many, it is PyTorch's sort.

Dense times sparse is the same with everything transposed, which strides do. The gradient of a dense operand is such a
product too, with the transposed pattern; that of the blocks is sampled: program i has block i and walks along K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import accumulator, cdiv, next_power
from tilestack.ops.autocast import lowered

PLACES_AT_ONCE = 1024  # that a program which sorts looks at
MOST_COMPARED = 2**26  # lines times blocks up to which counting takes less than a sort
VECTOR = 16  # elements; Triton sees vectors where strides are multiples of it


class Config(NamedTuple):
    """Columns of a tile of a dense result, the step along K, warps for sides up to 64, and steps under way. In half
    precision, where rows of tiles are whole vectors; all else has a small tile of its own."""

    n: int
    k: int
    warps: int
    stages: int


CONFIGS = {
    "128": Config(128, 64, 4, 3),
    "128 deep": Config(128, 64, 4, 5),
    "128 thin": Config(128, 32, 4, 3),
    "128 thick": Config(128, 128, 4, 3),
    "256": Config(256, 64, 4, 3),
    "64": Config(64, 64, 4, 4),
}
SMALL = Config(32, 32, 4, 2)


@triton.jit
def blocks_of_line_kernel(
    rows_ptr, columns_ptr, order_ptr, met_ptr, offsets_ptr,  # [blocks] four times, [lines + 1]
    blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one line: where its blocks begin in the order, which they are, and their columns."""
    line = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, blocks, BLOCK):
        there = first + place < blocks
        before += (tl.load(rows_ptr + first + place, mask=there, other=line) < line).to(tl.int32)
    begin = tl.sum(before)
    tl.store(offsets_ptr + line, begin)
    for first in range(0, blocks, BLOCK):
        block = first + place
        there = block < blocks
        mine = there & (tl.load(rows_ptr + block, mask=there, other=0) == line)
        count = tl.cumsum(mine.to(tl.int32))
        at = begin + count - 1
        tl.store(order_ptr + at, block, mask=mine)
        tl.store(met_ptr + at, tl.load(columns_ptr + block, mask=mine, other=0).to(tl.int32), mask=mine)
        begin += tl.max(count)


@triton.jit
def sparse_times_dense_kernel(
    values_ptr, order_ptr, met_ptr, offsets_ptr, x_ptr, out_ptr,  # [blocks, side, side], [blocks] twice, [lines + 1], [K, N], [M, N]
    N, values_stride_b, values_stride_m, values_stride_k, x_stride_k, x_stride_n, out_stride_m, out_stride_n,
    ACC: tl.constexpr, SIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, SIDE).to(tl.int64)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    values_at = values_ptr + m * values_stride_m + k[None, :] * values_stride_k
    x_at = x_ptr + k[:, None] * x_stride_k + n * x_stride_n
    total = tl.zeros([SIDE, BLOCK_N], ACC)
    PARTS: tl.constexpr = SIDE // BLOCK_K
    place, last = tl.load(offsets_ptr + line), tl.load(offsets_ptr + line + 1)
    block = tl.load(order_ptr + place, mask=place < last, other=0)
    column = tl.load(met_ptr + place, mask=place < last, other=0)
    # A line without blocks makes one step in which nothing is there.
    has_blocks = last > place
    steps = tl.maximum((last - place) * PARTS, 1)
    tl.assume(steps > 0)
    for step in range(steps):
        inner = step % PARTS * BLOCK_K
        ahead = place + (step + 1) // PARTS
        next_block = tl.load(order_ptr + ahead, mask=ahead < last, other=0)
        next_column = tl.load(met_ptr + ahead, mask=ahead < last, other=0)
        values_moved = block.to(tl.int64) * values_stride_b + tl.cast(inner, tl.int64) * values_stride_k
        x_moved = (column.to(tl.int64) * SIDE + inner) * x_stride_k
        a = tl.load(values_at + values_moved, mask=has_blocks, other=0)
        b = tl.load(x_at + x_moved, mask=(n < N) & has_blocks, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        block = next_block
        column = next_column
    at = out_ptr + (line * SIDE + m) * out_stride_m + n * out_stride_n
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def sampled_product_kernel(
    a_ptr, b_ptr, rows_ptr, columns_ptr, out_ptr,  # [M, K], [K, N], [blocks], [blocks], [blocks, side, side]
    K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    side = tl.arange(0, SIDE).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += (tl.load(rows_ptr + block).to(tl.int64) * SIDE + side)[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_ptr += (tl.load(columns_ptr + block).to(tl.int64) * SIDE + side)[None, :] * b_stride_n + k[:, None] * b_stride_k
    total = tl.zeros([SIDE, SIDE], ACC)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(a_ptr), tl.load(b_ptr)
        else:
            a = tl.load(a_ptr, mask=k[None, :] < K - start, other=0)
            b = tl.load(b_ptr, mask=k[:, None] < K - start, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        a_ptr += tl.cast(a_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    at = out_ptr + block * SIDE * SIDE + side[:, None] * SIDE + side[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty))


def sorted_by_line(rows: Tensor, columns: Tensor, lines: int) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks in the order of their lines, their columns in it, where each line's begin); nothing waits for the device."""
    blocks = rows.shape[0]
    if blocks * lines > MOST_COMPARED:
        ordered, order = rows.sort(stable=True)
        every = torch.arange(lines + 1, device=rows.device, dtype=rows.dtype)
        return order, columns[order], torch.searchsorted(ordered, every)
    empty = lambda size: torch.empty(size, dtype=torch.int32, device=rows.device)
    order, met, offsets = empty(blocks), empty(blocks), empty(lines + 1)
    launch(
        blocks_of_line_kernel, (lines + 1,), rows.contiguous(), columns.contiguous(), order, met, offsets, blocks,
        BLOCK=PLACES_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return order, met, offsets


def lies_in_vectors(matrix: Tensor) -> bool:
    """Whether rows or columns are contiguous and the others begin where a vector may."""
    return 1 in matrix.stride()[-2:] and not any(step % VECTOR for step in matrix.stride() if step != 1)


def suited(config: Config, *operands: Tensor) -> Config:
    in_vectors = all(map(lies_in_vectors, operands))
    return config if operands[0].dtype.itemsize == 2 and in_vectors else SMALL


def launch_options(config: Config, side: int) -> dict[str, int]:
    return dict(num_warps=config.warps * 2 if side == 128 else config.warps, num_stages=config.stages)


def sparse_times_dense(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, out: Tensor, config: Config) -> Tensor:
    """Into `out` [M, N], of any strides, the product of blocks and x [K, N]."""
    side, width = values.shape[1], x.shape[1]
    lines, config = out.shape[0] // side, suited(config, values, x)
    block_n = min(config.n, max(next_power(width), SMALL.n))
    launch(
        sparse_times_dense_kernel, (lines, cdiv(width, block_n)), values, *sorted_by_line(rows, columns, lines), x, out,
        width, *values.stride(), *x.stride(), *out.stride(), ACC=accumulator(values.dtype), SIDE=side, BLOCK_N=block_n,
        BLOCK_K=min(side, config.k), **launch_options(config, side),
    )  # fmt: skip
    return out


def sampled_product(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int, config: Config) -> Tensor:
    out = torch.empty((rows.shape[0], side, side), dtype=a.dtype, device=a.device)
    K, config = a.shape[1], suited(config, a, b)
    launch(
        sampled_product_kernel, (rows.shape[0],), a, b, rows.contiguous(), columns.contiguous(), out, K, *a.stride(),
        *b.stride(), EVEN_K=K % config.k == 0, ACC=accumulator(a.dtype), SIDE=side, BLOCK_K=config.k,
        **launch_options(config, side),
    )  # fmt: skip
    return out


def empty(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.empty((rows, columns), dtype=like.dtype, device=like.device)


def dsd(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int, config: Config) -> Tensor:
    out = empty(lines * values.shape[1], x.shape[1], x)
    return sparse_times_dense(values, rows, columns, x, out, config)


def dds(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int, config: Config) -> Tensor:
    out = empty(x.shape[0], width * values.shape[1], x)
    sparse_times_dense(values.mT, columns, rows, x.T, out.T, config)
    return out


def dsd_backward(
    grad: Tensor, values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, needs: tuple[bool, ...], config: Config
) -> tuple[Tensor | None, None, None, Tensor | None]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    v, dense, side = values.to(grad.dtype), x.to(grad.dtype), values.shape[1]
    dvalues = sampled_product(grad, dense.T, rows, columns, side, config).to(values.dtype) if needs[0] else None
    dx = dsd(v.mT, columns, rows, grad, x.shape[0] // side, config).to(x.dtype) if needs[3] else None
    return dvalues, None, None, dx


def dds_backward(
    grad: Tensor, x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, needs: tuple[bool, ...], config: Config
) -> tuple[Tensor | None, Tensor | None, None, None]:
    v, dense, side = values.to(grad.dtype), x.to(grad.dtype), values.shape[1]
    dx = dds(grad, v.mT, columns, rows, x.shape[1] // side, config).to(x.dtype) if needs[0] else None
    dvalues = sampled_product(dense.T, grad, rows, columns, side, config).to(values.dtype) if needs[1] else None
    return dx, dvalues, None, None


def sdd_backward(
    grad: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int, needs: tuple[bool, ...], config: Config
) -> tuple[Tensor | None, Tensor | None, None, None]:  # fmt: skip
    left, right = a.to(grad.dtype), b.to(grad.dtype)
    da = dsd(grad, rows, columns, right.T, a.shape[0] // side, config).to(a.dtype) if needs[0] else None
    db = dds(left.T, grad, rows, columns, b.shape[1] // side, config).to(b.dtype) if needs[1] else None
    return da, db, None, None


@implements(ops.block_sparse_dsd, backend="triton", repeat=straight_line, backward=dsd_backward, configs=CONFIGS)
def block_sparse_dsd(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int, config: Config) -> Tensor:
    values, x = lowered(values, x)
    return dsd(values, rows, columns, x, lines, config)


@implements(ops.block_sparse_dds, backend="triton", repeat=straight_line, backward=dds_backward, configs=CONFIGS)
def block_sparse_dds(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int, config: Config) -> Tensor:
    x, values = lowered(x, values)
    return dds(x, values, rows, columns, width, config)


@implements(ops.block_sparse_sdd, backend="triton", repeat=straight_line, backward=sdd_backward, configs=CONFIGS)
def block_sparse_sdd(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int, config: Config) -> Tensor:
    a, b = lowered(a, b)
    return sampled_product(a, b, rows, columns, side, config)
