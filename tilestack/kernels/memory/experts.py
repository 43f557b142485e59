"""Moving rows between tokens and experts, a program for some columns of a token and all K of its copies.

    dispatch    x[t] is read once and written K times        combine    K rows are read, weighted, added and written once

Each is the other's gradient, but for the weights, whose gradients are products of rows, made while they are read.

Sorting is by counting. A block of choices finds each one's rank among those of its expert in the block by comparing all
pairs, and how many of each expert it has. The sums of these counts, expert by expert and block by block, say where the
block's first choice of an expert lies:

              block 0   block 1   block 2
    expert 0     2         0         1         counts
    expert 1     1         3         0
              →  0         2         2         all counts before: expert 1 of block 1 begins at place 4
                 3         4         7
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import cdiv, next_power, rows_of, wide

CHOICES = 128  # of a block
TILE = 4096  # elements that a program moves at a time


@triton.jit
def rank_in_block(chosen, valid, BLOCK: tl.constexpr):
    """How many choices of the same expert come before each one."""
    number = tl.arange(0, BLOCK)
    same = (chosen[:, None] == chosen[None, :]) & (number[None, :] < number[:, None]) & valid[None, :]
    return tl.sum(same.to(tl.int32), 1)


@triton.jit
def count_choices_kernel(chosen_ptr, counts_ptr, count, experts, blocks, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + place, mask=place < count, other=-1).to(tl.int32)
    valid = (chosen >= 0) & (chosen < experts)
    rank = rank_in_block(chosen, valid, BLOCK)
    number = tl.arange(0, BLOCK)
    later = (chosen[:, None] == chosen[None, :]) & (number[None, :] > number[:, None])
    is_last = tl.sum(later.to(tl.int32), 1) == 0
    tl.store(counts_ptr + chosen * blocks + tl.program_id(0), rank + 1, mask=valid & is_last)


@triton.jit
def place_choices_kernel(
    chosen_ptr, counts_ptr, ends_ptr, places_ptr, offsets_ptr,  # [T * K], [experts, blocks] twice, [T * K], [experts]
    count, experts, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + place, mask=place < count, other=-1).to(tl.int32)
    valid = (chosen >= 0) & (chosen < experts)
    mine = chosen * blocks + tl.program_id(0)
    end = tl.load(ends_ptr + mine, mask=valid, other=0)
    start = end - tl.load(counts_ptr + mine, mask=valid, other=0)
    found = tl.where(valid, start + rank_in_block(chosen, valid, BLOCK), -1)
    tl.store(places_ptr + place, found.to(tl.int64), mask=place < count)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        last = tl.load(ends_ptr + (expert + 1) * blocks - 1, mask=expert < experts, other=0)
        tl.store(offsets_ptr + expert, last, mask=expert < experts)


@triton.jit
def copies_of_token(places_ptr, K, count, COPIES: tl.constexpr):
    """(number in the token's row, place, whether there is one) of each copy; a place out of range is none."""
    copy = tl.program_id(0).to(tl.int64) * K + tl.arange(0, COPIES)
    place = tl.load(places_ptr + copy, mask=tl.arange(0, COPIES) < K, other=-1)
    return copy, place, (place >= 0) & (place < count)


@triton.jit
def dispatch_rows_kernel(
    x_ptr, places_ptr, out_ptr,  # [T, columns], [T, K], [T * K, columns]
    count, columns, K, x_stride, COPIES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    _, place, there = copies_of_token(places_ptr, K, count, COPIES)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * x_stride + column, mask=column < columns, other=0)
    inside = there[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + place[:, None] * columns + column[None, :], x[None, :], mask=inside)


@triton.jit
def combine_rows_kernel(
    rows_ptr, weights_ptr, places_ptr, out_ptr,  # [T * K, columns], [T, K] or None, [T, K], [T, columns]
    count, columns, K, rows_stride, COPIES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    copy, place, there = copies_of_token(places_ptr, K, count, COPIES)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = there[:, None] & (column < columns)[None, :]
    rows = wide(tl.load(rows_ptr + place[:, None] * rows_stride + column[None, :], mask=inside, other=0))
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + copy, mask=there, other=0).to(rows.dtype)
        rows = tl.where(inside, rows * weights[:, None], 0)
    out = out_ptr + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(out, tl.sum(rows, 0).to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def combine_rows_bwd_kernel(
    grad_ptr, rows_ptr, weights_ptr, places_ptr, drows_ptr, dweights_ptr,
    count, columns, K, grad_stride, rows_stride, COPIES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    copy, place, there = copies_of_token(places_ptr, K, count, COPIES)
    grad_ptr += tl.program_id(0).to(tl.int64) * grad_stride
    weights = tl.load(weights_ptr + copy, mask=there, other=0)
    ACC: tl.constexpr = tl.float64 if rows_ptr.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([COPIES, COLS], ACC)
    for first in range(0, columns, COLS):
        column = first + tl.arange(0, COLS)
        inside = there[:, None] & (column < columns)[None, :]
        grad = tl.load(grad_ptr + column, mask=column < columns, other=0).to(ACC)[None, :]
        if drows_ptr is not None:
            drows = (grad * weights.to(ACC)[:, None]).to(drows_ptr.dtype.element_ty)
            tl.store(drows_ptr + place[:, None] * columns + column[None, :], drows, mask=inside)
        if dweights_ptr is not None:
            rows = tl.load(rows_ptr + place[:, None] * rows_stride + column[None, :], mask=inside, other=0)
            total += tl.where(inside, grad * rows.to(ACC), 0)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + copy, tl.sum(total, 1).to(dweights_ptr.dtype.element_ty), mask=tl.arange(0, COPIES) < K)


def tile_of_copies(places: Tensor, columns: int) -> dict[str, int]:
    copies = next_power(max(places.shape[1], 1))
    width = min(next_power(max(columns, 1)), max(TILE // copies, 32))
    return dict(COPIES=copies, COLS=width, num_warps=4 if copies * width >= 1024 else 1)


def dispatched(x: Tensor, places: Tensor) -> Tensor:
    x, (tokens, k) = rows_of(x), places.shape
    columns = x.shape[1]
    out = torch.empty((tokens * k, columns), dtype=x.dtype, device=x.device)
    tile = tile_of_copies(places, columns)
    launch(
        dispatch_rows_kernel, (tokens, cdiv(columns, tile["COLS"])), x, places.contiguous(), out,
        tokens * k, columns, k, x.stride(0), **tile,
    )  # fmt: skip
    return out


def combined(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    rows, (tokens, k) = rows_of(rows), places.shape
    columns = rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    tile = tile_of_copies(places, columns)
    launch(
        combine_rows_kernel, (tokens, cdiv(columns, tile["COLS"])), rows,
        None if weights is None else weights.contiguous(), places.contiguous(), out,
        tokens * k, columns, k, rows.stride(0), **tile,
    )  # fmt: skip
    return out


def dispatch_rows_backward(grad: Tensor, places: Tensor) -> tuple[Tensor, None]:
    return combined(grad, None, places), None


@implements(ops.dispatch_rows, backend="triton", repeat=straight_line, backward=dispatch_rows_backward)
def dispatch_rows(x: Tensor, places: Tensor) -> Tensor:
    return dispatched(x, places)


def combine_rows_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    grad, rows, (tokens, k) = rows_of(grad), rows_of(rows), places.shape
    columns = rows.shape[1]
    drows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if needs[0] else None
    dweights = torch.empty(weights.shape, dtype=weights.dtype, device=rows.device) if needs[1] else None
    launch(
        combine_rows_bwd_kernel, (tokens,), grad, rows, weights.contiguous(), places.contiguous(), drows, dweights,
        tokens * k, columns, k, grad.stride(0), rows.stride(0), **tile_of_copies(places, columns),
    )  # fmt: skip
    return drows, dweights, None


@implements(ops.combine_rows, backend="triton", repeat=straight_line, backward=combine_rows_backward)
def combine_rows(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    return combined(rows, weights, places)


@implements(ops.expert_places, backend="triton", repeat=straight_line)
def expert_places(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    chosen, count = chosen.contiguous(), chosen.numel()
    blocks = cdiv(max(count, 1), CHOICES)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=chosen.device)
    offsets = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    counts = torch.zeros(experts * blocks, dtype=torch.int32, device=chosen.device)
    launch(count_choices_kernel, (blocks,), chosen, counts, count, experts, blocks, BLOCK=CHOICES, num_warps=8)
    ends = counts.cumsum(0, dtype=torch.int32)
    launch(
        place_choices_kernel, (blocks,), chosen, counts, ends, places, offsets, count, experts, blocks,
        EXPERTS=next_power(experts), BLOCK=CHOICES, num_warps=4,
    )  # fmt: skip
    return places, offsets
