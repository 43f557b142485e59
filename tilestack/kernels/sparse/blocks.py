"""Products with matrices of blocks: a program for each tile of a dense result, or for each block of a sparse one.

    S            x              out
    +--+--+--+   +-----+        +-----+      line 1 has the blocks (1, 0) and (1, 2): its tile of the result is
    |  |  |  |   |     |        |     |      block (1, 0) times rows 0 of x plus block (1, 2) times rows 2 of x.
    +--+--+--+ × +-----+   =    +-----+      Absent blocks cost nothing, not even a look: blocks are sorted by line on
    |■ |  |■ |   |     |        |  ■  |      the device, and offsets say where each line's begin.
    +--+--+--+   +-----+        +-----+

Dense times sparse is the same with everything transposed, which strides do. The gradient of a dense operand is such a
product too, with the transposed pattern; that of the blocks is sampled: program i has block i and walks along K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.kernels.tiles import accumulator, cdiv
from tilestack.ops.autocast import lowered


@triton.jit
def sparse_times_dense_kernel(
    values_ptr, order_ptr, offsets_ptr, columns_ptr, x_ptr, out_ptr,  # [blocks, side, side], [blocks], [lines + 1], [blocks], [K, N], [M, N]
    N, values_stride_b, values_stride_m, values_stride_k, x_stride_k, x_stride_n, out_stride_m, out_stride_n,
    ACC: tl.constexpr, SIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, SIDE).to(tl.int64)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    total = tl.zeros([SIDE, BLOCK_N], ACC)
    steps: tl.constexpr = SIDE // BLOCK_K
    first, last = tl.load(offsets_ptr + line), tl.load(offsets_ptr + line + 1)
    for step in range(first * steps, last * steps):
        block = tl.load(order_ptr + step // steps)
        inner = step % steps * BLOCK_K + k
        column = tl.load(columns_ptr + block).to(tl.int64) * SIDE
        a = tl.load(values_ptr + block * values_stride_b + m * values_stride_m + inner[None, :] * values_stride_k)
        b = tl.load(x_ptr + (column + inner)[:, None] * x_stride_k + n * x_stride_n, mask=n < N, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
    at = out_ptr + (line * SIDE + m) * out_stride_m + n * out_stride_n
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def sampled_product_kernel(
    a_ptr, b_ptr, rows_ptr, columns_ptr, out_ptr,  # [M, K], [K, N], [blocks], [blocks], [blocks, side, side]
    K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    ACC: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    side = tl.arange(0, SIDE).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += (tl.load(rows_ptr + block).to(tl.int64) * SIDE + side)[:, None] * a_stride_m
    b_ptr += (tl.load(columns_ptr + block).to(tl.int64) * SIDE + side)[None, :] * b_stride_n
    total = tl.zeros([SIDE, SIDE], ACC)
    for start in range(0, K, BLOCK_K):
        inner = start + k
        a = tl.load(a_ptr + inner[None, :] * a_stride_k, mask=inner[None, :] < K, other=0)
        b = tl.load(b_ptr + inner[:, None] * b_stride_k, mask=inner[:, None] < K, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
    at = out_ptr + block * SIDE * SIDE + side[:, None] * SIDE + side[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty))


def sorted_by(places: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """(blocks in the order of their lines, where each line's begin in it); nothing waits for the device."""
    ordered, order = places.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(lines + 1, device=places.device, dtype=places.dtype))


def sparse_times_dense(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Into `out` [M, N], of any strides, the product of blocks and x [K, N]."""
    side, width = values.shape[1], x.shape[1]
    order, offsets = sorted_by(rows, out.shape[0] // side)
    block_n = 128 if width >= 128 and side >= 64 and x.dtype.itemsize == 2 else 32
    launch(
        sparse_times_dense_kernel, (out.shape[0] // side, cdiv(width, block_n)), values, order, offsets,
        columns.contiguous(), x, out, width, *values.stride(), *x.stride(), *out.stride(), ACC=accumulator(values.dtype),
        SIDE=side, BLOCK_N=block_n, BLOCK_K=min(side, 32), num_warps=8 if side == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def sampled_product(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int) -> Tensor:
    out = torch.empty((rows.shape[0], side, side), dtype=a.dtype, device=a.device)
    launch(
        sampled_product_kernel, (rows.shape[0],), a, b, rows.contiguous(), columns.contiguous(), out, a.shape[1],
        *a.stride(), *b.stride(), ACC=accumulator(a.dtype), SIDE=side, BLOCK_K=32, num_warps=8 if side == 128 else 4,
        num_stages=2,
    )  # fmt: skip
    return out


def empty(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.empty((rows, columns), dtype=like.dtype, device=like.device)


def dsd(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int) -> Tensor:
    out = empty(lines * values.shape[1], x.shape[1], x)
    return sparse_times_dense(values, rows, columns, x, out)


def dds(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    out = empty(x.shape[0], width * values.shape[1], x)
    sparse_times_dense(values.mT, columns, rows, x.T, out.T)
    return out


def dsd_backward(
    grad: Tensor, values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, None, None, Tensor | None]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    v, dense, side = values.to(grad.dtype), x.to(grad.dtype), values.shape[1]
    dvalues = sampled_product(grad, dense.T, rows, columns, side).to(values.dtype) if needs[0] else None
    dx = dsd(v.mT, columns, rows, grad, x.shape[0] // side).to(x.dtype) if needs[3] else None
    return dvalues, None, None, dx


def dds_backward(
    grad: Tensor, x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, None, None]:
    v, dense, side = values.to(grad.dtype), x.to(grad.dtype), values.shape[1]
    dx = dds(grad, v.mT, columns, rows, x.shape[1] // side).to(x.dtype) if needs[0] else None
    dvalues = sampled_product(dense.T, grad, rows, columns, side).to(values.dtype) if needs[1] else None
    return dx, dvalues, None, None


def sdd_backward(
    grad: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, None, None]:
    left, right = a.to(grad.dtype), b.to(grad.dtype)
    da = dsd(grad, rows, columns, right.T, a.shape[0] // side).to(a.dtype) if needs[0] else None
    db = dds(left.T, grad, rows, columns, b.shape[1] // side).to(b.dtype) if needs[1] else None
    return da, db, None, None


@implements(ops.block_sparse_dsd, backend="triton", backward=dsd_backward)
def block_sparse_dsd(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int) -> Tensor:
    values, x = lowered(values, x)
    return dsd(values, rows, columns, x, lines)


@implements(ops.block_sparse_dds, backend="triton", backward=dds_backward)
def block_sparse_dds(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    x, values = lowered(x, values)
    return dds(x, values, rows, columns, width)


@implements(ops.block_sparse_sdd, backend="triton", backward=sdd_backward)
def block_sparse_sdd(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int) -> Tensor:
    a, b = lowered(a, b)
    return sampled_product(a, b, rows, columns, side)
