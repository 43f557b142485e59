"""Softmax kernels. Short rows share a program, rows up to 32 k live in registers, longer ones are walked twice.

columns ->
+-----------------+   a tile of ROWS x COLS: COLS is the row's length rounded up to a power of two
| program 0       |
+-----------------+   one read, one write: max, exp, sum and division happen in registers
| program 1       |
+-----------------+   longer: pass one keeps a running max and a sum rescaled to it, pass two writes
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.launch import accumulator, launch, rows_of, tile_of_rows, wide
from tilestack.ops import implements

WIDEST = 32768  # columns that one program keeps in registers
CHUNK = 8192  # columns per step of the long-row kernels


@triton.jit
def softmax_fwd_kernel(x_ptr, out_ptr, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")))
    x = x - tl.max(x, 1, keep_dims=True)
    numerator = tl.exp(x)
    out = numerator / tl.sum(numerator, 1, keep_dims=True)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_fwd_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, ACC: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    lane = tl.arange(0, CHUNK)
    # Each lane keeps its own running max and sum, so the loop needs no reduction; they are merged once at the end.
    largest = tl.full([CHUNK], -float("inf"), ACC)
    total = tl.zeros([CHUNK], ACC)
    for start in range(0, columns, CHUNK):
        x = tl.load(x_ptr + start + lane, mask=start + lane < columns, other=-float("inf")).to(ACC)
        new = tl.maximum(largest, x)
        reference = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - reference) + tl.exp(x - reference)
        largest = new
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - top), 0)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=-float("inf")).to(ACC)
        tl.store(out_ptr + start + lane, (tl.exp(x - top) / total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd_kernel(

    grad_ptr, y_ptr, out_ptr, rows, columns, grad_stride, y_stride, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    grad = wide(tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0))
    y = wide(tl.load(y_ptr + row * y_stride + column, mask=inside, other=0))
    inner = tl.sum(grad * y, 1, keep_dims=True)
    tl.store(out_ptr + row * out_stride + column, (y * (grad - inner)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_bwd_kernel(
    grad_ptr, y_ptr, out_ptr, columns, grad_stride, y_stride, out_stride, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    y_ptr += row * y_stride
    out_ptr += row * out_stride
    lane = tl.arange(0, CHUNK)
    inner = tl.zeros([CHUNK], ACC)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        grad = tl.load(grad_ptr + start + lane, mask=inside, other=0).to(ACC)
        inner += grad * tl.load(y_ptr + start + lane, mask=inside, other=0).to(ACC)
    total = tl.sum(inner, 0)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        grad = tl.load(grad_ptr + start + lane, mask=inside, other=0).to(ACC)
        y = tl.load(y_ptr + start + lane, mask=inside, other=0).to(ACC)
        tl.store(out_ptr + start + lane, (y * (grad - total)).to(out_ptr.dtype.element_ty), mask=inside)


def last_and_back(x: Tensor, dim: int) -> Tensor:
    """x with the dimension moved last; applying it to a result moves it back."""
    return x if dim in (-1, x.ndim - 1) else x.transpose(dim, -1)


def softmax_backward(grad: Tensor, out: Tensor, dim: int) -> Tensor:
    moved = last_and_back(out, dim)
    y, grad = rows_of(moved), rows_of(last_and_back(grad, dim))
    rows, columns = y.shape
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if columns <= WIDEST:
        height, width, warps = tile_of_rows(columns)
        launch(
            softmax_bwd_kernel,
            (triton.cdiv(rows, height),),
            grad,
            y,
            dx,
            rows,
            columns,
            grad.stride(0),
            y.stride(0),
            dx.stride(0),
            ROWS=height,
            COLS=width,
            num_warps=warps,
        )
    else:
        launch(
            softmax_long_bwd_kernel,
            (rows,),
            grad,
            y,
            dx,
            columns,
            grad.stride(0),
            y.stride(0),
            dx.stride(0),
            ACC=accumulator(out.dtype),
            CHUNK=CHUNK,
            num_warps=16,
        )
    return last_and_back(dx.view(moved.shape), dim) if out.ndim != 2 or moved is not out else dx


@implements(ops.softmax, backend="triton", backward=softmax_backward)
def softmax(x: Tensor, dim: int) -> Tensor:
    moved = last_and_back(x, dim)
    source = rows_of(moved)
    rows, columns = source.shape
    out = torch.empty_like(source, memory_format=torch.contiguous_format)
    if columns <= WIDEST:
        height, width, warps = tile_of_rows(columns)
        launch(
            softmax_fwd_kernel,
            (triton.cdiv(rows, height),),
            source,
            out,
            rows,
            columns,
            source.stride(0),
            out.stride(0),
            ROWS=height,
            COLS=width,
            num_warps=warps,
        )
    else:
        launch(
            softmax_long_fwd_kernel,
            (rows,),
            source,
            out,
            columns,
            source.stride(0),
            out.stride(0),
            ACC=accumulator(out.dtype),
            CHUNK=CHUNK,
            num_warps=16,
        )
    return last_and_back(out.view(moved.shape), dim) if x.ndim != 2 or moved is not x else out
