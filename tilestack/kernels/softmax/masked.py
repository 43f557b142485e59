"""Masked and causal softmax kernels: those of `softmax`, reading only what counts.

    causal, 6 x 6          row i sees columns up to i + columns - rows
    x . . . . .
    x x . . . .            x is read, rounded up to the next 16 columns so that loads stay 16 bytes wide;
    x x x . . .            . is never read, only written, as zero
    x x x x . .
    x x x x x .            forward: half a read and a write; backward: two halves of a read and a write
    x x x x x x

A mask is one byte an element, read where it lies: a row of x finds its row of the mask from its place in three merged
leading dimensions, so that a mask shared by heads or queries is never spread out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.softmax.rows import WIDEST_SOFTMAX
from tilestack.kernels.tiles import accumulator, cdiv, rows_of, tile_of_rows, wide

CHUNK = 8192  # columns per step of the long-row kernels
WIDE_LOAD = 16  # bytes, and elements of a mask
# Numbers that are others for a row alone than for the same row among many: compiled for some of them, a kernel would read
# rows in another layout, and add them up in another order.
OF_THE_BATCH = ["rows", "middle", "height", "outer_stride", "middle_stride", "mask_stride"]


@triton.jit
def reach(row, columns, height):
    """How many columns a row sees, and that number rounded up to whole loads; height: the rows of one matrix."""
    seen = tl.maximum(row % height + 1 + columns - height, 0).to(tl.int32)
    return seen, (seen + 15) // 16 * 16


@triton.jit
def load_scores(
    x_ptr, mask_ptr, row, column, inside, columns, x_stride, scale, middle, height, outer_stride, middle_stride, mask_stride,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """(scores, -inf where excluded; whether they count). The mask's strides are so many UNITs."""
    if CAUSAL:
        seen, loaded = reach(row, columns, height)
        counts = inside & (column < seen)
        inside = inside & (column < loaded)
    else:
        matrix = row // height
        mask_ptr += (
            matrix // middle * outer_stride + matrix % middle * middle_stride + row % height * mask_stride
        ) * UNIT
        counts = inside & (tl.load(mask_ptr + column, mask=inside, other=0) != 0)
    x = wide(tl.load(x_ptr + row * x_stride + column, mask=inside, other=0))
    return tl.where(counts, x * scale, -float("inf")), counts


@triton.jit
def reference(top):
    """What to subtract from the scores of a row with this maximum: zero where it has none."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def share(numerator, total, counts):
    return tl.where(counts, numerator / tl.where(total == 0, 1.0, total), 0.0)


@triton.jit(do_not_specialize=OF_THE_BATCH)
def masked_softmax_fwd_kernel(
    x_ptr, mask_ptr, out_ptr,  # [rows, columns], [outer, middle, height, columns], [rows, columns]
    rows, columns, x_stride, scale, middle, height, outer_stride, middle_stride, mask_stride,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x, counts = load_scores(
        x_ptr, mask_ptr, row, column, inside, columns, x_stride, scale, middle, height, outer_stride, middle_stride,
        mask_stride, CAUSAL, UNIT,
    )  # fmt: skip
    numerator = tl.exp(x - reference(tl.max(x, 1, keep_dims=True)))
    out = share(numerator, tl.sum(numerator, 1, keep_dims=True), counts)
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_THE_BATCH)
def masked_softmax_long_fwd_kernel(
    x_ptr, mask_ptr, out_ptr,
    rows, columns, x_stride, scale, middle, height, outer_stride, middle_stride, mask_stride,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    end = columns
    if CAUSAL:
        end = reach(row, columns, height)[0]
    largest = tl.full([CHUNK], -float("inf"), ACC)
    total = tl.zeros([CHUNK], ACC)
    for start in range(0, end, CHUNK):
        x, _ = load_scores(
            x_ptr, mask_ptr, row, start + lane, start + lane < columns, columns, x_stride, scale, middle, height,
            outer_stride, middle_stride, mask_stride, CAUSAL, UNIT,
        )  # fmt: skip
        new = tl.maximum(largest, x.to(ACC))
        total = total * tl.exp(largest - reference(new)) + tl.exp(x - reference(new))
        largest = new
    top = reference(tl.max(largest, 0))
    whole = tl.sum(total * tl.exp(largest - top), 0)
    for start in range(0, columns, CHUNK):
        x, counts = load_scores(
            x_ptr, mask_ptr, row, start + lane, start + lane < columns, columns, x_stride, scale, middle, height,
            outer_stride, middle_stride, mask_stride, CAUSAL, UNIT,
        )  # fmt: skip
        out = share(tl.exp(x - top), whole, counts)
        tl.store(out_ptr + row * columns + start + lane, out.to(out_ptr.dtype.element_ty), mask=start + lane < columns)


@triton.jit
def load_gradient(grad_ptr, y_ptr, row, column, inside, columns, grad_stride, y_stride, height, CAUSAL: tl.constexpr):
    """(grad, zero where a causal row sees nothing; y; what it sees)."""
    counts = inside
    if CAUSAL:
        seen, loaded = reach(row, columns, height)
        counts = inside & (column < seen)
        inside = inside & (column < loaded)
    grad = wide(tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0))
    y = wide(tl.load(y_ptr + row * y_stride + column, mask=inside, other=0))
    return tl.where(counts, grad, 0.0), y, counts


@triton.jit(do_not_specialize=["rows", "height"])
def masked_softmax_bwd_kernel(
    grad_ptr, y_ptr, dx_ptr,
    rows, columns, grad_stride, y_stride, scale, height,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    grad, y, counts = load_gradient(
        grad_ptr, y_ptr, row, column, inside, columns, grad_stride, y_stride, height, CAUSAL
    )
    inner = tl.sum(grad * y, 1, keep_dims=True)
    dx = tl.where(counts, scale * y * (grad - inner), 0.0)
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "height"])
def masked_softmax_long_bwd_kernel(
    grad_ptr, y_ptr, dx_ptr,
    rows, columns, grad_stride, y_stride, scale, height,
    CAUSAL: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    inner = tl.zeros([CHUNK], ACC)
    end = columns
    if CAUSAL:
        end = reach(row, columns, height)[0]
    for start in range(0, end, CHUNK):
        grad, y, _ = load_gradient(
            grad_ptr, y_ptr, row, start + lane, start + lane < columns, columns, grad_stride, y_stride, height, CAUSAL
        )
        inner += grad * y
    total = tl.sum(inner, 0)
    for start in range(0, columns, CHUNK):
        inside = start + lane < columns
        grad, y, counts = load_gradient(
            grad_ptr, y_ptr, row, start + lane, inside, columns, grad_stride, y_stride, height, CAUSAL
        )
        dx = tl.where(counts, scale * y * (grad - total), 0.0)
        tl.store(dx_ptr + row * columns + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor, mask: Tensor | None, scale: float, places: tuple[int, ...], unit: int = 1) -> Tensor:
    """Softmax of scale * x where the mask, or without one the diagonal, lets it; `places` as `places_in_mask` has them."""
    source = rows_of(x)
    rows, columns = source.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = source, mask, out, rows, columns, source.stride(0), float(scale), *places
    if columns <= WIDEST_SOFTMAX:
        height, width, warps = tile_of_rows(columns)
        grid = (cdiv(rows, height),)
        launch(
            masked_softmax_fwd_kernel, grid, *arguments,
            CAUSAL=mask is None, UNIT=unit, ROWS=height, COLS=width, num_warps=warps,
        )  # fmt: skip
    else:
        launch(
            masked_softmax_long_fwd_kernel, (rows,), *arguments,
            CAUSAL=mask is None, UNIT=unit, ACC=accumulator(x.dtype), CHUNK=CHUNK, num_warps=16,
        )  # fmt: skip
    return out


def backward(grad: Tensor, out: Tensor, scale: float, causal: bool) -> Tensor:
    arriving, y = rows_of(grad), rows_of(out)
    rows, columns = y.shape
    dx = torch.empty_like(out, memory_format=torch.contiguous_format)
    height_of_matrix = out.shape[-2] if causal else 1
    arguments = arriving, y, dx, rows, columns, arriving.stride(0), y.stride(0), float(scale), height_of_matrix
    if columns <= WIDEST_SOFTMAX:
        height, width, warps = tile_of_rows(columns)
        grid = (cdiv(rows, height),)
        launch(masked_softmax_bwd_kernel, grid, *arguments, CAUSAL=causal, ROWS=height, COLS=width, num_warps=warps)
    else:
        launch(
            masked_softmax_long_bwd_kernel, (rows,), *arguments,
            CAUSAL=causal, ACC=accumulator(out.dtype), CHUNK=CHUNK, num_warps=16,
        )  # fmt: skip
    return dx


def places_in_mask(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, ...], int]:
    """The mask as bytes; (middle, height, three strides): where the rows of a tensor of that shape find theirs; the strides' unit.

    Leading dimensions merge where one stride serves both; a mask that keeps more than three is copied row by row.
    """
    spread = mask.expand(shape)
    if spread.stride(-1) != 1 and shape[-1] > 1:
        spread = mask.expand(*mask.shape[:-1], shape[-1]).contiguous().expand(shape)
    merged: list[tuple[int, int]] = []  # (length, stride), outermost first
    for length, stride in zip(shape[:-1], spread.stride()[:-1], strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * stride:
            merged[-1] = merged[-1][0] * length, stride
        else:
            merged.append((length, stride))
    if len(merged) > 3:
        spread = spread.contiguous()
        merged = [(shape[:-1].numel(), shape[-1])]
    (_, outer), (middle, middle_stride), (height, stride) = [(1, 0)] * (3 - len(merged)) + merged
    aligned = all(number % WIDE_LOAD == 0 for number in (shape[-1], *spread.stride()[:-1]))
    unit = WIDE_LOAD if aligned else 1
    return spread.view(torch.uint8), (middle, height, outer // unit, middle_stride // unit, stride // unit), unit


def masked_softmax_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, None]:
    return backward(grad, out, 1.0, causal=False), None


@implements(
    ops.masked_softmax, backend="triton", invariant=True, repeat=straight_line, backward=masked_softmax_backward
)
def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    shown, places, unit = places_in_mask(mask, x.shape)
    return forward(x, shown, 1.0, places, unit)


def causal_softmax_backward(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    return backward(grad, out, scale, causal=True)


@implements(
    ops.causal_softmax, backend="triton", invariant=True, repeat=straight_line, backward=causal_softmax_backward
)
def causal_softmax(x: Tensor, scale: float) -> Tensor:
    return forward(x, None, scale, (1, x.shape[-2], 0, 0, 0))
