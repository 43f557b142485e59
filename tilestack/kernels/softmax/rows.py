"""Softmax, log-softmax and logsumexp kernels. Short rows share a program, rows up to 32 k live in registers, longer ones are walked twice.

columns ->
+-----------------+   a tile of ROWS x COLS: COLS is the row's length rounded up to a power of two
| program 0       |
+-----------------+   one read, one write: max, exp, sum and division happen in registers
| program 1       |
+-----------------+   longer: pass one keeps a running max and a sum rescaled to it, pass two writes, walking back,
                      since what was read last is still in the cache

Log-softmax is the same walk with another ending, and so is the gradient of logsumexp: softmax times what arrives at the
row. Logsumexp itself ends after the first pass, with one number a row. Where that number can be kept unrounded its
gradient needs no row as a whole, exp(x - lse) · grad, and is one pass over tiles of any shape, however long the rows.
The backward of softmax, with two tensors, reads the longer of the rows in registers again instead, from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.arithmetic import exp_of
from tilestack.kernels.elementwise.gated import load_tile, store_tile, tile_of_matrix, tiles_over
from tilestack.kernels.tiles import accumulator, cdiv, rows_of, shared_memory, tile_of_rows, wide

WIDEST_SOFTMAX = 32768  # columns that one program keeps in registers
HELD = 8192  # columns of which softmax backward keeps both tensors there, and leaves registers for another program
CHUNK_BYTES = 8192  # of a long row per step of its forward
STAGES = 5  # a chunk that is worked on, and those on their way to shared memory
BACKWARD_CHUNK_BYTES = 32768  # of either tensor per step of its backward


@triton.jit
def finite(top):
    """What to subtract in place of a row's maximum, so that rows of infinities come out as they should: zero for those."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def softmax_fwd_kernel(
    x_ptr, scale_ptr, out_ptr,  # [rows, columns], [rows], [rows, columns]
    rows, columns, x_stride,
    LOG: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")))
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    x = x - tl.max(x, 1, keep_dims=True)
    numerator = exp_of(x, HALF)
    total = tl.sum(numerator, 1, keep_dims=True)
    if LOG:
        out = x - tl.log(total)
    elif SCALED:
        out = numerator * (tl.load(scale_ptr + row, mask=row < rows, other=0) / total)
    else:
        out = numerator * (1 / total) if HALF else numerator / total
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_normaliser(x_ptr, columns, ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    """(max, sum of exp(x - finite(max))) of one row read in chunks."""
    lane = tl.arange(0, CHUNK)
    # Each lane keeps its own running max and sum, so the loop needs no reduction; they are merged once at the end.
    largest = tl.full([CHUNK], -float("inf"), ACC)
    total = tl.zeros([CHUNK], ACC)
    for start in tl.range(0, columns, CHUNK, num_stages=STAGES):
        x = tl.load(x_ptr + start + lane, mask=start + lane < columns, other=-float("inf")).to(ACC)
        new = tl.maximum(largest, x)
        total = total * tl.exp(largest - finite(new)) + tl.exp(x - finite(new))
        largest = new
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp(largest - finite(top)), 0)


@triton.jit
def softmax_long_fwd_kernel(
    x_ptr, scale_ptr, out_ptr,
    columns, x_stride,
    LOG: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * columns
    lane = tl.arange(0, CHUNK)
    top, total = long_normaliser(x_ptr, columns, ACC, CHUNK, STAGES)
    total = tl.where(top == float("inf"), float("nan"), total)  # no distribution over infinite scores
    last = (tl.cdiv(columns, CHUNK) - 1) * CHUNK
    for back in tl.range(0, columns, CHUNK, num_stages=STAGES):
        column = last - back + lane
        inside = column < columns
        x = tl.load(x_ptr + column, mask=inside, other=-float("inf")).to(ACC) - top
        out = x - tl.log(total) if LOG else tl.exp(x) / total
        if SCALED:
            out = out * tl.load(scale_ptr + row)
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd_kernel(
    grad_ptr, y_ptr, out_ptr,
    rows, columns, grad_stride, y_stride,
    LOG: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows that are not HELD in registers while they are added up are read again, from the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    grad = wide(tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0))
    y = wide(tl.load(y_ptr + row * y_stride + column, mask=inside, other=0))
    HALF: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    total = tl.sum(grad if LOG else grad * y, 1, keep_dims=True)
    if not HELD:
        grad = wide(tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0, cache_modifier=".ca"))
        y = wide(tl.load(y_ptr + row * y_stride + column, mask=inside, other=0, cache_modifier=".ca"))
    out = grad - exp_of(y, HALF) * total if LOG else y * (grad - total)
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_bwd_kernel(
    grad_ptr, y_ptr, out_ptr,
    columns, grad_stride, y_stride,
    LOG: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    y_ptr += row * y_stride
    out_ptr += row * columns
    lane = tl.arange(0, CHUNK)
    inner = tl.zeros([CHUNK], ACC)
    for start in tl.range(0, columns, CHUNK, num_stages=STAGES):
        inside = start + lane < columns
        grad = tl.load(grad_ptr + start + lane, mask=inside, other=0).to(ACC)
        inner += grad if LOG else grad * tl.load(y_ptr + start + lane, mask=inside, other=0).to(ACC)
    total = tl.sum(inner, 0)
    last = (tl.cdiv(columns, CHUNK) - 1) * CHUNK
    for back in tl.range(0, columns, CHUNK, num_stages=STAGES):
        column = last - back + lane
        inside = column < columns
        grad = tl.load(grad_ptr + column, mask=inside, other=0).to(ACC)
        y = tl.load(y_ptr + column, mask=inside, other=0).to(ACC)
        out = grad - tl.exp(y) * total if LOG else y * (grad - total)
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def logsumexp_fwd_kernel(
    x_ptr, out_ptr, lse_ptr,  # [rows, columns], [rows], [rows] unrounded or None
    rows, columns, x_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)[None, :]
    inside = (row[:, None] < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=-float("inf")))
    top = finite(tl.max(x, 1))
    out = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=row < rows)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, out, mask=row < rows)


@triton.jit
def logsumexp_long_fwd_kernel(
    x_ptr, out_ptr, lse_ptr, columns, x_stride, ACC: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top, total = long_normaliser(x_ptr + row * x_stride, columns, ACC, CHUNK, STAGES)
    out = finite(top) + tl.log(total)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        tl.store(lse_ptr + row, out)


@triton.jit
def logsumexp_bwd_kernel(
    grad_ptr, x_ptr, lse_ptr, dx_ptr,  # [rows], [rows, columns], [rows], [rows, columns]
    rows, columns, x_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = tile_of_matrix(rows, columns, ROWS, COLS)
    x = load_tile(x_ptr, row, start, whole, rows, columns, x_stride, COLS)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0)
    grad = wide(tl.load(grad_ptr + row, mask=row < rows, other=0))
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    store_tile(dx_ptr, exp_of(x - lse, HALF) * grad, row, start, whole, rows, columns, columns, COLS)


def last_and_back(x: Tensor, dim: int) -> Tensor:
    """x with the dimension moved last; applying it to a result moves it back."""
    return x if dim in (-1, x.ndim - 1) else x.transpose(dim, -1)


def distribution(x: Tensor, dim: int, log: bool = False, scale: Tensor | None = None) -> Tensor:
    """softmax(x), its logarithm, or softmax times a scale for each row."""
    moved = last_and_back(x, dim)
    source = rows_of(moved)
    rows, columns = source.shape
    out = torch.empty_like(source, memory_format=torch.contiguous_format)
    tensors, flags = (source, scale, out), dict(LOG=log, SCALED=scale is not None)
    if columns <= WIDEST_SOFTMAX:
        height, width, warps = tile_of_rows(columns)
        launch(
            softmax_fwd_kernel, (cdiv(rows, height),), *tensors, rows, columns, source.stride(0),
            **flags, ROWS=height, COLS=width, num_warps=warps,
        )  # fmt: skip
    else:
        launch(
            softmax_long_fwd_kernel, (rows,), *tensors, columns, source.stride(0),
            **flags, ACC=accumulator(x.dtype), CHUNK=CHUNK_BYTES // x.element_size(), STAGES=STAGES, num_warps=8,
        )  # fmt: skip
    return last_and_back(out.view(moved.shape), dim).contiguous() if x.ndim != 2 or moved is not x else out


def distribution_backward(grad: Tensor, out: Tensor, dim: int, log: bool) -> Tensor:
    moved = last_and_back(out, dim)
    y, grad = rows_of(moved), rows_of(last_and_back(grad, dim))
    rows, columns = y.shape
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if columns <= WIDEST_SOFTMAX:
        height, width, warps = tile_of_rows(columns)
        held = log or columns <= HELD
        launch(
            softmax_bwd_kernel, (cdiv(rows, height),), grad, y, dx, rows, columns, grad.stride(0), y.stride(0),
            LOG=log, HELD=held, ROWS=height, COLS=width, num_warps=warps if held else 32,
        )  # fmt: skip
    else:
        launch(
            softmax_long_bwd_kernel, (rows,), grad, y, dx, columns, grad.stride(0), y.stride(0),
            LOG=log, ACC=accumulator(out.dtype), CHUNK=BACKWARD_CHUNK_BYTES // out.element_size(),
            STAGES=3 if shared_memory(out.device) > 4 * BACKWARD_CHUNK_BYTES else 2, num_warps=32,
        )  # fmt: skip
    return last_and_back(dx.view(moved.shape), dim) if out.ndim != 2 or moved is not out else dx


@implements(
    ops.softmax,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, out, dim: distribution_backward(grad, out, dim, False),
)
def softmax(x: Tensor, dim: int) -> Tensor:
    return distribution(x, dim)


@implements(
    ops.log_softmax,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, out, dim: distribution_backward(grad, out, dim, True),
)
def log_softmax(x: Tensor, dim: int) -> Tensor:
    return distribution(x, dim, log=True)


def logsumexp_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    return distribution(x, dim, scale=arriving(grad, dim))


def arriving(grad: Tensor, dim: int) -> Tensor:
    """What arrives at the rows, which are numbered with the dimension moved last."""
    return last_and_back(grad.unsqueeze(dim), dim).contiguous()


def logsumexp_with_lse_backward(grad: Tensor, x: Tensor, lse: Tensor, dim: int) -> Tensor:
    moved = last_and_back(x, dim)
    source = rows_of(moved)
    dx = torch.empty_like(source, memory_format=torch.contiguous_format)
    grid, tile = tiles_over(*source.shape)
    launch(
        logsumexp_bwd_kernel, grid, arriving(grad, dim), source, lse, dx, *source.shape, source.stride(0), **tile
    )  # fmt: skip
    return last_and_back(dx.view(moved.shape), dim)


def logsumexp_with_lse(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Also unrounded, a number for each row."""
    lse = empty_lse(x, dim)
    return logsumexp(x, dim, lse), lse


def empty_lse(x: Tensor, dim: int) -> Tensor:
    return torch.empty(x.numel() // x.shape[dim], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


@implements(
    ops.logsumexp,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=logsumexp_backward,
    extras=Extras(logsumexp_with_lse, logsumexp_with_lse_backward, when=lambda x: x.numel() > 0, fake=empty_lse),
)
def logsumexp(x: Tensor, dim: int, lse: Tensor | None = None) -> Tensor:
    moved = last_and_back(x, dim)
    source = rows_of(moved)
    rows, columns = source.shape
    out = torch.empty(moved.shape[:-1], dtype=x.dtype, device=x.device)
    if columns <= WIDEST_SOFTMAX:
        height, width, warps = tile_of_rows(columns)
        launch(
            logsumexp_fwd_kernel, (cdiv(rows, height),), source, out, lse, rows, columns, source.stride(0),
            ROWS=height, COLS=width, num_warps=warps,
        )  # fmt: skip
    else:
        launch(
            logsumexp_long_fwd_kernel, (rows,), source, out, lse, columns, source.stride(0),
            ACC=accumulator(x.dtype), CHUNK=CHUNK_BYTES // x.element_size(), STAGES=STAGES, num_warps=8,
        )  # fmt: skip
    return last_and_back(out.unsqueeze(-1), dim).squeeze(dim).contiguous()
