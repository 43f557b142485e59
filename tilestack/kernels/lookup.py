"""Embedding: rows gathered by id; the gradient a sum over the tokens of each row, without atomics.

The backward sorts the ids once, so that the tokens of a row lie together:

    sorted ids   2 2 2 5 | 5 5 5 5 | 5 5 7 9      tiles of TILE tokens
    summed first           5 5 5 5                a tile within one row's run, into line 1 of a buffer
    row 5              5 +  line 1 + 5 5          ends token by token, tiles between by their sum

A run of n tokens thus costs its row n / TILE + 2 · TILE steps instead of n, and every sum has one order. A program
starts at each sorted token and leaves unless a run starts there too; the rows that no token names, which are most, are
zeroed beforehand at the speed of memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.launch import accumulator, cdiv, launch, next_power
from tilestack.kernels.repeat import straight
from tilestack.ops import implements

TILE = 32  # sorted tokens summed together
LINES = 4  # of them loaded together
WIDEST = 1024  # columns of a program
TOKENS = 8  # rows of a gathering program


@triton.jit
def embedding_fwd_kernel(
    ids_ptr, weight_ptr, out_ptr,
    tokens, vocabulary, width, weight_stride,
    TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    row = tl.load(ids_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    known = (row >= 0) & (row < vocabulary)
    x = tl.load(weight_ptr + row * weight_stride + column, mask=known & (column < width), other=float("nan"))
    tl.store(out_ptr + token * width + column, x, mask=(token < tokens) & (column < width))


@triton.jit
def sum_tokens(
    grad_ptr, order_ptr, start, end, column, width, grad_stride,
    ACC: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum of the gradients of the sorted tokens start … end - 1."""
    total = tl.zeros([LINES, COLS], ACC)
    for line in range(start, end, LINES):
        place = line + tl.arange(0, LINES)[:, None]
        token = tl.load(order_ptr + place, mask=place < end, other=0)
        inside = (place < end) & (column < width)
        total += tl.load(grad_ptr + token * grad_stride + column, mask=inside, other=0).to(ACC)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def embedding_tiles_kernel(
    grad_ptr, sorted_ptr, order_ptr, sums_ptr,
    width, grad_stride,
    ACC: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """sums[tile] of the whole tiles that lie within one run; the other lines stay unwritten and unread."""
    start = tl.program_id(0).to(tl.int64) * TILE
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    if tl.load(sorted_ptr + start) == tl.load(sorted_ptr + start + TILE - 1):
        total = sum_tokens(grad_ptr, order_ptr, start, start + TILE, column, width, grad_stride, ACC, LINES, COLS)
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * width + column, total, mask=column < width)


@triton.jit
def end_of_run(sorted_ptr, start, tokens, row, TILE: tl.constexpr):
    """Where the run of a row that starts at a sorted token ends: seen at a glance if short, else halved down to."""
    place = start + tl.arange(0, TILE)
    same = tl.load(sorted_ptr + place, mask=place < tokens, other=-1) == row
    end = start + tl.sum(same.to(tl.int64), 0)
    if end == start + TILE:
        beyond = tokens
        while end < beyond:
            middle = (end + beyond) // 2
            if tl.load(sorted_ptr + middle) == row:
                end = middle + 1
            else:
                beyond = middle
    return end


@triton.jit
def embedding_bwd_kernel(
    grad_ptr, sorted_ptr, order_ptr, sums_ptr, dweight_ptr,
    tokens, vocabulary, width, grad_stride, padding,
    ACC: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    row = tl.load(sorted_ptr + start).to(tl.int64)
    before = tl.load(sorted_ptr + start - 1, mask=start > 0, other=-1)
    if (row != before) & (row >= 0) & (row < vocabulary) & (row != padding):
        end = end_of_run(sorted_ptr, start, tl.cast(tokens, tl.int64), row, TILE)
        # Whole tiles of this run, first … last - 1; without any, all of the run is before them.
        first = tl.cdiv(start, TILE)
        last = tl.maximum(end // TILE, first)
        ragged = tl.where(first < last, first * TILE, end)
        total = sum_tokens(grad_ptr, order_ptr, start, ragged, column, width, grad_stride, ACC, LINES, COLS)
        if first < last:
            sums = tl.zeros([LINES, COLS], ACC)
            for tile in range(first, last, LINES):
                line = tile + tl.arange(0, LINES)[:, None]
                sums += tl.load(sums_ptr + line * width + column, mask=(line < last) & (column < width), other=0)
            total += tl.sum(sums, 0, keep_dims=True)
            total += sum_tokens(grad_ptr, order_ptr, last * TILE, end, column, width, grad_stride, ACC, LINES, COLS)
        tl.store(dweight_ptr + row * width + column, total.to(dweight_ptr.dtype.element_ty), mask=column < width)


def columns_of(width: int) -> tuple[int, int]:
    """(columns of a program, programs that cover a row)."""
    columns = min(next_power(max(width, 1)), WIDEST)
    return columns, cdiv(width, columns)


def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[None, Tensor]:
    vocabulary, width = weight.shape
    arriving = grad.reshape(-1, width) if width else grad.new_empty(ids.numel(), 0)
    arriving = arriving if arriving.stride(1) == 1 else arriving.contiguous()
    ordered, order = torch.sort(ids.flatten(), stable=True)
    columns, across = columns_of(width)
    tokens = ids.numel()
    tiles = tokens // TILE
    acc = accumulator(weight.dtype)
    scratch = torch.float64 if weight.dtype == torch.float64 else torch.float32
    sums = torch.empty((tiles, width), dtype=scratch, device=grad.device)
    dweight = torch.zeros((vocabulary, width), dtype=weight.dtype, device=grad.device)
    constants = dict(ACC=acc, TILE=TILE, LINES=LINES, COLS=columns, num_warps=4)
    launch(
        embedding_tiles_kernel, (tiles, across), arriving, ordered, order, sums, width, arriving.stride(0), **constants
    )
    launch(
        embedding_bwd_kernel, (tokens, across), arriving, ordered, order, sums, dweight,
        tokens, vocabulary, width, arriving.stride(0), -1 if padding_idx is None else padding_idx, **constants,
    )  # fmt: skip
    return None, dweight


@implements(ops.embedding, backend="triton", repeat=straight, backward=embedding_backward)
def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    vocabulary, width = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    columns, across = columns_of(width)
    launch(
        embedding_fwd_kernel, (cdiv(ids.numel(), TOKENS), across), ids.contiguous(), weight, out,
        ids.numel(), vocabulary, width, weight.stride(0), TOKENS=TOKENS, COLS=columns, num_warps=4,
    )  # fmt: skip
    return out
