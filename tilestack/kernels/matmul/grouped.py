"""The readable grouped matmul: the tiles of matmul.py, laid over groups of rows whose sizes only the GPU knows.

        K                         N
    +--------+ offsets        +-------+
    | group 0|  ← 5         0 |  B 0  |     A tile of C belongs to one group: its rows of A times its own B. Groups
    +--------+                +-------+     start anywhere, so each has its own tiles, the last of them partly empty.
    | group 1|              1 |  B 1  |
    |        |  ← 14          +-------+

There is no waiting for the sizes: as many programs start as tiles could be needed at most, each counts through the
groups which tile is its own, and those left over return. Rows past the last group are one more, whose C is zero.

The gradient of A is the same product with B transposed. That of B adds up over the rows of a group: one program per
tile of each group's B, walking along its rows.
"""

from collections.abc import Callable, Sequence

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

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of two operands and where groups end

ZEROED = 64, 128  # rows and columns of a tile of zeros


@triton.jit
def spans_of_groups(ends_ptr, M, groups, GROUPS: tl.constexpr):
    """The first row of each group and where it ends; the rows past the last group are one more, and what follows is empty."""
    g = tl.arange(0, GROUPS)
    ends = tl.minimum(tl.load(ends_ptr + g, mask=g < groups, other=M), M)
    starts = tl.minimum(tl.load(ends_ptr + g - 1, mask=(g > 0) & (g <= groups), other=tl.where(g > 0, M, 0)), M)
    return starts, ends


@triton.jit
def span_of_tile(tile, ends_ptr, M, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row, where the group ends) of the tile with this number; behind the last tile, a group that is not there."""
    g = tl.arange(0, GROUPS)
    starts, ends = spans_of_groups(ends_ptr, M, groups, GROUPS)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    done = tl.cumsum(tiles, 0) <= tile  # the groups that end before this tile
    group = tl.sum(done.to(tl.int32), 0)
    first_row = tl.sum(tl.where(g == group, starts, 0), 0)
    first_row += (tile - tl.sum(tl.where(done, tiles, 0), 0)) * BLOCK_M
    return group, first_row, tl.sum(tl.where(g == group, ends, 0), 0)


@triton.jit
def grouped_linear_fwd_kernel(
    a_ptr, b_ptr, ends_ptr, c_ptr,  # [M, K], [groups, K, N], [groups], [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_g, b_stride_k, b_stride_n, groups,
    GROUPS: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, first_row, end = span_of_tile(tl.program_id(0), ends_ptr, M, groups, GROUPS, BLOCK_M)
    if group > groups:
        return
    K = tl.where(group < groups, K, 0)  # rows past the last group are multiplied with nothing
    m = first_row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += m * a_stride_m + k[None, :] * a_stride_k
    b_ptr += group.to(tl.int64) * b_stride_g + k[:, None] * b_stride_k + n * b_stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for first in range(0, K, BLOCK_K):
        left = K - first
        a = tl.load(a_ptr, mask=(m < end) & (k[None, :] < left), other=0)
        b = tl.load(b_ptr, mask=(k[:, None] < left) & (n < N), other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        a_ptr += tl.cast(a_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    tl.store(c_ptr + m * N + n, total.to(c_ptr.dtype.element_ty), mask=(m < end) & (n < N))


@triton.jit
def grouped_linear_bwd_kernel(
    grad_ptr, x_ptr, ends_ptr, dweight_ptr,  # [M, N], [M, K], [groups], [groups, N, K]
    M, N, K, grad_stride_m, grad_stride_n, x_stride_m, x_stride_k,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    end = tl.minimum(tl.load(ends_ptr + group), M)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    total = tl.zeros([BLOCK_N, BLOCK_K], ACC)
    for first in range(start, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M).to(tl.int64)
        grad = tl.load(
            grad_ptr + m[None, :] * grad_stride_m + n * grad_stride_n, mask=(m[None, :] < end) & (n < N), other=0
        )
        x = tl.load(x_ptr + m[:, None] * x_stride_m + k * x_stride_k, mask=(m[:, None] < end) & (k < K), other=0)
        total = tl.dot(grad, x, total, input_precision="ieee", out_dtype=ACC)
    place = dweight_ptr + group * N * K + n * K + k
    tl.store(place, total.to(dweight_ptr.dtype.element_ty), mask=(n < N) & (k < K))


@triton.jit
def zero_rows_past_kernel(out_ptr, ends_ptr, rows, columns, groups, ROWS: tl.constexpr, COLS: tl.constexpr):
    first = tl.load(ends_ptr + groups - 1)
    top = tl.program_id(0).to(tl.int64) * ROWS
    if top + ROWS > first:
        row = top + tl.arange(0, ROWS)[:, None]
        for start in range(0, columns, COLS):
            column = start + tl.arange(0, COLS)[None, :]
            inside = (row >= first) & (row < rows) & (column < columns)
            tl.store(out_ptr + row * columns + column, tl.zeros([ROWS, COLS], out_ptr.dtype.element_ty), mask=inside)


def zero_rows_past(out: Tensor, offsets: Tensor) -> Tensor:
    """`out`, contiguous, with zeros written to the rows past the last offset; where there are none, hardly more than a launch."""
    rows, columns = out.shape
    grid = (cdiv(rows, ZEROED[0]),)
    launch(
        zero_rows_past_kernel, grid, out, offsets, rows, columns, len(offsets),
        ROWS=ZEROED[0], COLS=ZEROED[1], num_warps=4,
    )  # fmt: skip
    return out


def blocks(dtype: torch.dtype, *sizes: int) -> tuple[int, int, int, int]:
    """(M, N, K, warps) of a tile: large where the matrices are."""
    block = (128, 128, 64, 8) if dtype.itemsize == 2 else (64, 64, 16, 4)
    return block if all(size >= block[0] for size in sizes) else (32, 32, min(32, block[2]), 4)


def most_tiles(rows: int, groups: int, block: int) -> int:
    """How many there are if each group, and what is left past the last of them, ends with a tile of one row."""
    return min(rows, (rows + (groups + 1) * (block - 1)) // block)


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a[rows of group g] @ b[g], for operands of any strides; zero in rows of no group."""
    (M, K), (groups, _, N) = a.shape, b.shape
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_m, block_n, block_k, warps = blocks(a.dtype, M // max(groups, 1), N)
    grid = most_tiles(M, groups, block_m), cdiv(N, block_n)
    launch(
        grouped_linear_fwd_kernel, grid, a, b, offsets.contiguous(), c, M, N, K, *a.stride(), *b.stride(), groups,
        GROUPS=next_power(groups + 1), ACC=accumulator(a.dtype), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return c


def gradient_of_weight(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad[rows of group g].T @ x[rows of group g], zero for a group without rows."""
    N, K, groups = grad.shape[1], x.shape[1], offsets.shape[0]
    dweight = torch.empty((groups, N, K), dtype=x.dtype, device=x.device)
    block_n, block_k, block_m, warps = blocks(x.dtype, N, K)
    grid = cdiv(N, block_n), cdiv(K, block_k), groups
    launch(
        grouped_linear_bwd_kernel, grid, grad, x, offsets.contiguous(), dweight, len(x), N, K, *grad.stride(), *x.stride(),
        ACC=accumulator(x.dtype), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return dweight


def gradients_by(
    product: Product,
    weight_product: Product,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, None]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    dx = product(grad, weight.to(grad.dtype), offsets).to(x.dtype) if needs[0] else None
    return dx, weight_product(grad, x.to(grad.dtype), offsets).to(weight.dtype) if needs[1] else None, None


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    return gradients_by(grouped_matmul, gradient_of_weight, grad, x, weight, offsets, needs)


@implements(ops.grouped_linear, backend="triton", repeat=straight_line, backward=grouped_linear_backward)
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    x, weight = lowered(x, weight)
    return grouped_matmul(x, weight.mT, offsets)
