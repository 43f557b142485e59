"""Embedding: rows gathered by id; the gradient a sum over the tokens of each row, without atomics.

The backward sorts the tokens by id, so that those of a row lie together in a run, and cuts them into tiles:

    sorted ids   2 2 3 5 | 5 5 5 5 | 5 5 7 9      tiles of TILE tokens, a program each (and per COLS columns)
    to dweight   Σ   ▪                   ▪ ▪      a run within its tile is a row of dweight
    to pieces          s   h h h h   h h          of a longer one, each tile has a piece: where it starts, or a later one

A program loads all lines of its tile before it adds the first, and goes down them once. Then the runs that were cut are
put together, s + h + h. Every sum has one order, and the most frequent token costs its row n / TILE steps.

Most of dweight is rows that no token names. Zeros are written to all of it at the speed of memory, and under that time,
in the same launch, tokens are sorted: the place of one is the number of tokens before it, counted by comparing it with
every other. Too many tokens for that are sorted by PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import accumulator, cdiv, next_power, widened

EMBEDDED_COLUMNS = 1024  # columns of a program
TOKENS = 8  # rows of a gathering program
TILE = 16  # sorted tokens whose gradients a program adds up
PIECES = 32, 128  # lines and columns that a program loads together to join the pieces of a run
COUNTED = 16384  # the most tokens that are sorted by counting
RANKED, OTHERS = 16, 256  # tokens that a program counts for, and those it compares them with at a time
FILL = 16384  # zeros that a program writes


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
def load_keys(ids_ptr, token, tokens, vocabulary):
    """What tokens are sorted by: their ids; for those outside the vocabulary -1 or, as where there is no token, its size."""
    ids = tl.load(ids_ptr + token, mask=token < tokens, other=0)
    return tl.where(ids < 0, -1, tl.where((ids < vocabulary) & (token < tokens), ids, vocabulary)).to(tl.int32)


@triton.jit
def embedding_sort_kernel(
    ids_ptr, sorted_ptr, order_ptr, dweight_ptr,
    tokens, vocabulary, elements, counters,
    RANKED: tl.constexpr, OTHERS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Sort the tokens, in the first `counters` programs, and fill dweight with zeros, in the others."""
    program = tl.program_id(0)
    if program < counters:
        token = program * RANKED + tl.arange(0, RANKED)[:, None]
        key = load_keys(ids_ptr, token, tokens, vocabulary)
        place = tl.zeros([RANKED, OTHERS], tl.int32)
        nearest = program * RANKED // OTHERS * OTHERS  # where the block begins that these tokens are part of
        for start in range(0, tokens, OTHERS):
            other_key = load_keys(ids_ptr, start + tl.arange(0, OTHERS)[None, :], tokens, vocabulary)
            # Among equals the earlier token is first: all of a block are before or after, but for the nearest block.
            other_key -= (start < nearest).to(tl.int32)
            place -= (other_key - key) >> 31  # -1 where smaller; in SASS one instruction less than a comparison
        other = nearest + tl.arange(0, OTHERS)[None, :]
        equal = load_keys(ids_ptr, other, tokens, vocabulary) == key
        place += (equal & (other < token)).to(tl.int32)
        place = tl.sum(place, 1, keep_dims=True)
        tl.store(sorted_ptr + place, key, mask=token < tokens)
        tl.store(order_ptr + place, token, mask=token < tokens)
    else:
        offset = (program - counters).to(tl.int64) * FILL + tl.arange(0, FILL)
        tl.store(dweight_ptr + offset, tl.zeros([FILL], dweight_ptr.dtype.element_ty), mask=offset < elements)


@triton.jit
def embedding_bwd_kernel(
    grad_ptr, sorted_ptr, order_ptr, dweight_ptr, pieces_ptr,  # pieces [tiles, 2, width]
    tokens, vocabulary, width, grad_stride, padding,
    ACC: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sums of the runs in a tile: rows of dweight, or pieces (a later one, a starting one) of runs that were cut."""
    start = tl.program_id(0).to(tl.int64) * TILE
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < width
    rows: tl.tuple = ()  # of the token before the tile, of those in it, of the one after
    lines: tl.tuple = ()
    for i in tl.static_range(-1, TILE + 1):
        place = start + i
        exists = (place >= 0) & (place < tokens)
        rows += (tl.load(sorted_ptr + place, mask=exists, other=-2).to(tl.int64),)  # -2 is no key
        if i >= 0 and i < TILE:
            token = tl.load(order_ptr + place, mask=exists, other=0).to(tl.int64)
            lines += (tl.load(grad_ptr + token * grad_stride + column, mask=inside, other=0),)
    total = tl.zeros([COLS], ACC)
    later = total
    for i in tl.static_range(TILE):
        row = rows[i + 1]
        total = tl.where(row == rows[i], total, 0) + lines[i].to(ACC)
        later = tl.where(row == rows[0], total, later)
        ends_here = (row != rows[0]) & (row != rows[i + 2])
        known = (row >= 0) & (row < vocabulary) & (row != padding)
        target = dweight_ptr + row * width + column
        tl.store(target, total.to(dweight_ptr.dtype.element_ty), mask=inside & ends_here & known)
    pieces_ptr += tl.program_id(0).to(tl.int64) * 2 * width + column
    if rows[1] == rows[0]:
        tl.store(pieces_ptr, later, mask=inside)
    if (rows[TILE] == rows[TILE + 1]) & (rows[TILE] != rows[0]):
        tl.store(pieces_ptr + width, total, mask=inside)


@triton.jit
def embedding_join_kernel(
    sorted_ptr, pieces_ptr, dweight_ptr,
    tokens, vocabulary, width, padding,
    TILE: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The row of dweight whose run starts in a tile and goes on in the next, from its pieces."""
    tile = tl.program_id(0).to(tl.int64)
    last = tile * TILE + TILE - 1
    before = tl.load(sorted_ptr + last - TILE, mask=tile > 0, other=-2)
    row = tl.load(sorted_ptr + last).to(tl.int64)
    after = tl.load(sorted_ptr + last + 1, mask=last + 1 < tokens, other=-2)
    if (row != before) & (row == after) & (row >= 0) & (row < vocabulary) & (row != padding):
        column = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
        inside = column < width
        total = tl.zeros([LINES, COLS], pieces_ptr.dtype.element_ty)
        first, going_on = tile + 1, True
        while going_on:
            line = first + tl.arange(0, LINES)[:, None]
            same = tl.load(sorted_ptr + line * TILE, mask=line * TILE < tokens, other=-2) == row
            total += tl.load(pieces_ptr + line * 2 * width + column, mask=same & inside, other=0)
            first += LINES
            going_on = tl.min(same.to(tl.int32)) == 1
        start = tl.load(pieces_ptr + (tile * 2 + 1) * width + column, mask=inside, other=0)
        total = start + tl.sum(total, 0, keep_dims=True)
        tl.store(dweight_ptr + row * width + column, total.to(dweight_ptr.dtype.element_ty), mask=inside)


def columns_of(width: int, most: int = EMBEDDED_COLUMNS) -> tuple[int, int]:
    """(columns of a program, programs that cover a row)."""
    columns = min(next_power(max(width, 1)), most)
    return columns, cdiv(width, columns)


def sorted_and_zeros(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids in order, the token of each, zeros like the weight). Equal ids stay in the order of their tokens."""
    tokens, vocabulary, elements = ids.numel(), weight.shape[0], weight.numel()
    key = torch.int32 if vocabulary < 2**30 else torch.int64
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    counters = 0
    if tokens > COUNTED or key is torch.int64:
        ordered, order = torch.sort(ids.flatten().clamp(-1, vocabulary).to(key), stable=True)
    else:
        counters = cdiv(tokens, RANKED)
        ordered, order = (torch.empty(tokens, dtype=dtype, device=ids.device) for dtype in (key, torch.int32))
    launch(
        embedding_sort_kernel, (counters + cdiv(elements, FILL),), ids.contiguous(), ordered, order, dweight,
        tokens, vocabulary, elements, counters, RANKED=RANKED, OTHERS=OTHERS, FILL=FILL, num_warps=4,
    )  # fmt: skip
    return ordered, order, dweight


def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[None, Tensor]:
    vocabulary, width = weight.shape
    arriving = grad.reshape(-1, width) if width else grad.new_empty(ids.numel(), 0)
    arriving = arriving if arriving.stride(1) == 1 else arriving.contiguous()
    ordered, order, dweight = sorted_and_zeros(ids, weight)
    tokens, padding = ids.numel(), -1 if padding_idx is None else padding_idx
    tiles = cdiv(tokens, TILE)
    pieces = torch.empty((tiles, 2, width), dtype=widened(weight.dtype), device=grad.device)
    columns, across = columns_of(width)
    launch(
        embedding_bwd_kernel, (tiles, across), arriving, ordered, order, dweight, pieces,
        tokens, vocabulary, width, arriving.stride(0), padding,
        ACC=accumulator(weight.dtype), TILE=TILE, COLS=columns, num_warps=max(1, columns // 256),
    )  # fmt: skip
    lines, columns = PIECES
    columns, across = columns_of(width, columns)
    launch(
        embedding_join_kernel, (tokens // TILE, across), ordered, pieces, dweight, tokens, vocabulary, width, padding,
        TILE=TILE, LINES=lines, COLS=columns, num_warps=4,
    )  # fmt: skip
    return None, dweight


@implements(ops.embedding, backend="triton", invariant=True, repeat=straight_line, backward=embedding_backward)
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
