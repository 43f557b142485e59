"""A matrix in compressed rows times a dense one: a program has a row and a strip of columns, and gathers rows of x.

    row r: values v0 v1 v2, columns 3 0 7      out[r, strip] = v0 · x[3, strip] + v1 · x[0, strip] + v2 · x[7, strip]

A tile is some elements of the row by the strip's columns, so that a strip is as wide as x where x is narrow, and a vector
is a strip of one. The gradient of x is the same product by compressed columns, which are sorted on the device; that of the
values is a product of two gathered rows for each element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.kernels.tiles import accumulator, cdiv, next_power
from tilestack.ops.autocast import lowered
from tilestack.ops.sparse import rows_of_elements

TILE = 2048  # elements of a tile
WIDEST = 128  # columns of a strip


@triton.jit
def csr_fwd_kernel(
    values_ptr, columns_ptr, offsets_ptr, x_ptr, out_ptr,  # [elements], [elements], [rows + 1], [K, N], [rows, N]
    N, values_stride, x_stride_k, x_stride_n,
    ACC: tl.constexpr, ELEMENTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    first, last = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    total = tl.zeros([ELEMENTS, COLS], ACC)
    for start in range(first, last, ELEMENTS):
        element = start + tl.arange(0, ELEMENTS).to(tl.int64)
        there = element < last
        value = tl.load(values_ptr + element * values_stride, mask=there, other=0).to(ACC)
        column = tl.load(columns_ptr + element, mask=there, other=0).to(tl.int64)
        at = x_ptr + column[:, None] * x_stride_k + n * x_stride_n
        total += value[:, None] * tl.load(at, mask=there[:, None] & (n < N), other=0).to(ACC)
    out_at = out_ptr + row * N + n
    tl.store(out_at, tl.sum(total, 0)[None, :].to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def csr_bwd_values_kernel(
    grad_ptr, x_ptr, rows_ptr, columns_ptr, dvalues_ptr,  # [rows, N], [K, N], [elements], [elements], [elements]
    elements, N, grad_stride_m, grad_stride_n, x_stride_k, x_stride_n,
    ACC: tl.constexpr, ELEMENTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = element < elements
    row = tl.load(rows_ptr + element, mask=there, other=0)[:, None].to(tl.int64)
    column = tl.load(columns_ptr + element, mask=there, other=0)[:, None].to(tl.int64)
    total = tl.zeros([ELEMENTS, COLS], ACC)
    for start in range(0, N, COLS):
        n = start + tl.arange(0, COLS)[None, :].to(tl.int64)
        inside = there[:, None] & (n < N)
        grad = tl.load(grad_ptr + row * grad_stride_m + n * grad_stride_n, mask=inside, other=0).to(ACC)
        total += grad * tl.load(x_ptr + column * x_stride_k + n * x_stride_n, mask=inside, other=0).to(ACC)
    tl.store(dvalues_ptr + element, tl.sum(total, 1).to(dvalues_ptr.dtype.element_ty), mask=there)


def strip_of(columns: int) -> dict[str, int]:
    width = min(next_power(max(columns, 1)), WIDEST)
    return dict(ELEMENTS=TILE // max(width, 16), COLS=width, num_warps=4)


def rows_times(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    """Compressed rows times x [K, N]."""
    rows, width = offsets.shape[0] - 1, x.shape[1]
    out = torch.empty((rows, width), dtype=values.dtype, device=x.device)
    tile = strip_of(width)
    launch(
        csr_fwd_kernel, (rows, cdiv(width, tile["COLS"])), values, columns.contiguous(), offsets.contiguous(), x, out,
        width, values.stride(0), *x.stride(), ACC=accumulator(values.dtype), **tile,
    )  # fmt: skip
    return out


def csr_backward(
    grad: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, None, None, Tensor | None]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    matrix = lambda t: t if t.ndim == 2 else t[:, None]
    arriving, dense, elements = matrix(grad), matrix(x).to(grad.dtype), values.shape[0]
    rows = rows_of_elements(offsets, elements)
    dvalues = dx = None
    if needs[0]:
        dvalues = torch.empty(elements, dtype=values.dtype, device=x.device)
        tile = strip_of(dense.shape[1])
        launch(
            csr_bwd_values_kernel, (cdiv(elements, tile["ELEMENTS"]),), arriving, dense, rows, columns.contiguous(), dvalues,
            elements, dense.shape[1], *arriving.stride(), *dense.stride(), ACC=accumulator(grad.dtype), **tile,
        )  # fmt: skip
    if needs[3]:
        ordered, order = columns.sort(stable=True)
        starts = torch.arange(x.shape[0] + 1, device=x.device, dtype=columns.dtype)
        taken = values.to(grad.dtype)[order], rows[order], torch.searchsorted(ordered, starts)
        dx = rows_times(*taken, arriving).view(x.shape).to(x.dtype)
    return dvalues, None, None, dx


@implements(ops.csr_matmul, backend="triton", backward=csr_backward)
def csr_matmul(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    values, x = lowered(values, x)
    if x.ndim == 2:
        return rows_times(values, columns, offsets, x)
    return rows_times(values, columns, offsets, x[:, None])[:, 0]
