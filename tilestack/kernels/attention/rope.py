"""Rotary embedding of q and k in one launch, alone or after an RMSNorm of every head.

A tile is a block of HEADS heads of each of a few tokens, a row for each head. HEADS divides the heads of q and of k, so that
only the last tokens can fall short of a tile. A program takes all blocks of its tokens, those of q and then of k, as far as
registers suffice, and asks for all that it reads before it needs any: heads, positions, and at last the angles found there.

              q: block 0   block 1  …   k: block 0  …         a row, and interleaved:
    token 0  |=========>|=========>|   |=========>|           +---------+---------+------+    +-----------------+------+
    token 1  |=========>|=========>|   |=========>|           | first   | second  | rest |    | f s f s f s f s | rest |
                                                              +---------+---------+------+    +-----------------+------+
              first · cos - second · sin, second · cos + first · sin, the rest copied

Turning back by the same angle is the gradient. The norm's own gradient is in `kernels/attention/qk_norm_rope.py`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, next_power

ELEMENTS, WARPS = 1024, 4  # of a tile, and of the program that turns it
MOST_BLOCKS = 8  # of heads that a program holds
PROGRAMS = 8  # at work on a multiprocessor: with fewer tiles, blocks of heads are programs of their own


@triton.jit
def load_head_columns(ptr, inside, column, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows' columns, of which COLUMNS exist, masked only where something may be missing."""
    if WHOLE and COLUMNS == WIDTH:
        x = tl.load(ptr)
    elif COLUMNS == WIDTH:
        x = tl.load(ptr, mask=inside, other=0)
    else:
        x = tl.load(ptr, mask=inside & (column < COLUMNS), other=0)
    return x


@triton.jit
def store_head_columns(ptr, value, inside, column, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    value = value.to(ptr.dtype.element_ty)
    if WHOLE and COLUMNS == WIDTH:
        tl.store(ptr, value)
    elif COLUMNS == WIDTH:
        tl.store(ptr, value, mask=inside)
    else:
        tl.store(ptr, value, mask=inside & (column < COLUMNS))


@triton.jit
def load_heads(ptr, inside, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr,
               PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """First and second elements of the pairs, and the rest (meaningless without any), of the heads at these pointers."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * WIDTH)[None, :]
        x = load_head_columns(ptr + both, inside, both, WHOLE, 2 * PAIRS, 2 * WIDTH).to(ACC)
        first, second = tl.split(tl.reshape(x, [x.shape[0], WIDTH, 2]))
    else:
        pair = tl.arange(0, WIDTH)[None, :]
        first = load_head_columns(ptr + pair, inside, pair, WHOLE, PAIRS, WIDTH).to(ACC)
        second = load_head_columns(ptr + PAIRS + pair, inside, pair, WHOLE, PAIRS, WIDTH).to(ACC)
    rest = first
    if REST:
        column = tl.arange(0, REST)[None, :]
        rest = load_head_columns(ptr + 2 * PAIRS + column, inside, column, WHOLE, DIM - 2 * PAIRS, REST).to(ACC)
    return first, second, rest


@triton.jit
def load_weight(ptr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
                WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    here = ptr + tl.zeros([1, 1], tl.int32)
    return load_heads(here, tl.full([1, 1], True, tl.int1), True, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST)


@triton.jit
def store_heads(ptr, first, second, rest, inside, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
                PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    if INTERLEAVED:
        both = tl.arange(0, 2 * WIDTH)[None, :]
        x = tl.reshape(tl.join(first, second), [first.shape[0], 2 * WIDTH])
        store_head_columns(ptr + both, x, inside, both, WHOLE, 2 * PAIRS, 2 * WIDTH)
    else:
        pair = tl.arange(0, WIDTH)[None, :]
        store_head_columns(ptr + pair, first, inside, pair, WHOLE, PAIRS, WIDTH)
        store_head_columns(ptr + PAIRS + pair, second, inside, pair, WHOLE, PAIRS, WIDTH)
    if REST:
        column = tl.arange(0, REST)[None, :]
        store_head_columns(ptr + 2 * PAIRS + column, rest, inside, column, WHOLE, DIM - 2 * PAIRS, REST)


@triton.jit
def rows_of_tile(tile, sequence, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """(batch, each row's token, its head in the block, whether its token exists); one token stays a single number."""
    tiles = tl.cdiv(sequence, TOKENS)
    batch = (tile // tiles).to(tl.int64)
    token = tl.full([1, 1], tile % tiles * TOKENS, tl.int64)
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    if TOKENS > 1:
        token += row // HEADS
    return batch, token, (row % HEADS).to(tl.int64), token < sequence


@triton.jit
def load_angles(cos_ptr, sin_ptr, positions_ptr, batch, token, inside, positions_stride, table,
                WHOLE: tl.constexpr, ACC: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Cosines and sines of the rows' tokens: NaN where a position is outside the tables, zero where nothing exists."""
    pair = tl.arange(0, WIDTH)[None, :]
    if positions_ptr is None:
        cos = load_head_columns(cos_ptr + token * PAIRS + pair, inside, pair, WHOLE, PAIRS, WIDTH).to(ACC)
        sin = load_head_columns(sin_ptr + token * PAIRS + pair, inside, pair, WHOLE, PAIRS, WIDTH).to(ACC)
    else:
        place = positions_ptr + batch * positions_stride + token
        position = load_head_columns(place, inside, token, WHOLE, 1, 1).to(tl.int64)
        mask = (position >= 0) & (position < table)
        if PAIRS != WIDTH:
            mask = mask & (pair < PAIRS)
        cos = tl.load(cos_ptr + position * PAIRS + pair, mask=mask, other=float("nan")).to(ACC)
        sin = tl.load(sin_ptr + position * PAIRS + pair, mask=mask, other=float("nan")).to(ACC)
        if not WHOLE or PAIRS != WIDTH:
            cos = tl.where(inside & (pair < PAIRS), cos, 0)
            sin = tl.where(inside & (pair < PAIRS), sin, 0)
    return cos, sin


@triton.jit
def root(first, second, rest, eps, DIM: tl.constexpr, REST: tl.constexpr):
    """1 / rms of each head."""
    squares = tl.sum(first * first + second * second, 1, keep_dims=True)
    if REST:
        squares += tl.sum(rest * rest, 1, keep_dims=True)
    return tl.rsqrt(squares / DIM + eps)


@triton.jit
def norm_heads(first, second, rest, weight_ptr, eps, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr,
               PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    a, b, c = load_weight(weight_ptr, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST)
    rstd = root(first, second, rest, eps, DIM, REST)
    return first * rstd * a, second * rstd * b, rest * rstd * c


@triton.jit
def rotate(first, second, cos, sin):
    # Of two products a compiler rounds either, another one for more tokens to a tile; here it is said which.
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def of_block(block, q_ptr, k_ptr, q_head_stride, k_head_stride, HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr):
    """Pointers moved on to this block of heads, of q's and then of k's."""
    if block < Q_BLOCKS:
        pointers = q_ptr + tl.full([], block * HEADS, tl.int64) * q_head_stride
    else:
        pointers = k_ptr + tl.full([], (block - Q_BLOCKS) * HEADS, tl.int64) * k_head_stride
    return pointers


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    sequence, table, positions_stride,
    q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    q_out_batch_stride, q_out_stride, q_out_head_stride, k_out_batch_stride, k_out_stride, k_out_head_stride, eps,
    BACK: tl.constexpr, IN_PLACE: tl.constexpr, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, blocks of heads / BLOCKS); BACK turns the other way."""
    batch, token, head, inside = rows_of_tile(tl.program_id(0), sequence, HEADS, TOKENS)
    q_ptr += batch * q_batch_stride + token * q_stride + head * q_head_stride
    k_ptr += batch * k_batch_stride + token * k_stride + head * k_head_stride
    q_out_ptr += batch * q_out_batch_stride + token * q_out_stride + head * q_out_head_stride
    k_out_ptr += batch * k_out_batch_stride + token * k_out_stride + head * k_out_head_stride
    if BLOCKS == Q_BLOCKS + K_BLOCKS:
        start: tl.constexpr = 0
    else:
        start = tl.program_id(1) * BLOCKS
    blocks: tl.tuple = ()
    for i in tl.static_range(BLOCKS):
        x_ptr = of_block(start + i, q_ptr, k_ptr, q_head_stride, k_head_stride, HEADS, Q_BLOCKS)
        blocks += (load_heads(x_ptr, inside, WHOLE, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST),)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, positions_ptr, batch, token, inside, positions_stride, table, WHOLE, ACC, PAIRS, WIDTH
    )
    if BACK:
        sin = -sin
    if IN_PLACE:
        tl.debug_barrier()  # threads that share an element must all have read it
    for i in tl.static_range(BLOCKS):
        first, second, rest = blocks[i]
        if q_weight_ptr is not None:
            weight_ptr = of_block(start + i, q_weight_ptr, k_weight_ptr, 0, 0, HEADS, Q_BLOCKS)
            first, second, rest = norm_heads(
                first, second, rest, weight_ptr, eps, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST
            )
        first, second = rotate(first, second, cos, sin)
        out_ptr = of_block(start + i, q_out_ptr, k_out_ptr, q_out_head_stride, k_out_head_stride, HEADS, Q_BLOCKS)
        store_heads(out_ptr, first, second, rest, inside, WHOLE, INTERLEAVED, DIM, PAIRS, WIDTH, REST)


def heads_of(x: Tensor) -> Tensor:
    """x with each head contiguous; copied only if its strides demand it."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def walk(positions: Tensor | None, *tensors: Tensor) -> tuple[tuple[int, int, int], list[int]]:
    """(batch, sequence, the positions' step from one sequence to the next) and every tensor's strides of batch, token, head.

    Sequences that lie end to end in all of them, each token with a position of its own, are one long sequence.
    """
    batch, sequence = tensors[0].shape[:2]
    own_positions = positions is not None and positions.ndim == 2
    if batch > 1 and own_positions and all(sequence == 1 or t.stride(0) == sequence * t.stride(1) for t in tensors):
        token = 0 if sequence == 1 else 1
        return (1, batch * sequence, 0), [step for t in tensors for step in (0, t.stride(token), t.stride(2))]
    return (batch, sequence, sequence if own_positions else 0), [step for t in tensors for step in t.stride()[:3]]


def tile_of_heads(q: Tensor, k: Tensor, sequence: int, pairs: int, interleaved: bool, elements: int) -> dict:
    head_dim, common = q.shape[3], math.gcd(q.shape[2], k.shape[2])
    rows = max(1, elements // next_power(head_dim))
    heads = min(rows, max(1, common & -common))
    tokens = min(rows // heads, next_power(sequence))
    return dict(
        WHOLE=sequence % tokens == 0,
        INTERLEAVED=interleaved,
        ACC=accumulator(q.dtype),
        HEADS=heads,
        TOKENS=tokens,
        DIM=head_dim,
        PAIRS=pairs,
        WIDTH=next_power(max(pairs, 1)),
        REST=next_power(head_dim - 2 * pairs) if head_dim > 2 * pairs else 0,
    )


def turn(
    q: Tensor,
    k: Tensor,
    out: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float = 0.0,
    back: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn q and k into `out`, which may be q and k themselves."""
    (batch, sequence, positions_stride), strides = walk(positions, q, k, *out)
    table, pairs = cos.shape
    tile = tile_of_heads(q, k, sequence, pairs, interleaved, ELEMENTS)
    tiles = batch * cdiv(sequence, tile["TOKENS"])
    q_blocks, k_blocks = (x.shape[2] // tile["HEADS"] for x in (q, k))
    most = MOST_BLOCKS if tiles >= PROGRAMS * multiprocessors(q.device) else 1
    blocks = max(count for count in range(1, most + 1) if (q_blocks + k_blocks) % count == 0)
    launch(
        rope_kernel, (tiles, (q_blocks + k_blocks) // blocks if q.shape[3] else 0),
        q, k, *weights, cos.contiguous(), sin.contiguous(), None if positions is None else positions.contiguous(), *out,
        sequence, table, positions_stride, *strides, float(eps), BACK=back, IN_PLACE=out[0] is q,
        **tile, Q_BLOCKS=q_blocks, K_BLOCKS=k_blocks, BLOCKS=blocks, num_warps=WARPS,
    )  # fmt: skip
    return out


def empty_like_pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)


def rope_backward(
    grad_turned_q: Tensor,
    grad_turned_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor | None, ...]:
    q, k = heads_of(grad_turned_q), heads_of(grad_turned_k)
    dq, dk = turn(q, k, empty_like_pair(q, k), (None, None), cos, sin, positions, interleaved, back=True)
    return dq, dk, None, None, None


@implements(ops.rope, backend="triton", invariant=True, repeat=straight_line, backward=rope_backward)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    q, k = heads_of(q), heads_of(k)
    return turn(q, k, empty_like_pair(q, k), (None, None), cos, sin, positions, interleaved)


@implements(
    ops.rope_,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    when=lambda q, k: (heads_of(q) is q and heads_of(k) is k) or "it writes heads whose elements lie side by side",
)
def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    turn(q, k, (q, k), (None, None), cos, sin, positions, interleaved)
