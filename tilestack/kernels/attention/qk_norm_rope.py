"""RMSNorm of every head of q and k, then rotary embedding; tiles and the forward are those of `kernels/attention/rope.py`.

With x̂ = x / rms(x) and g = (turned-back gradient) · weight,

    dx = rstd · (g - x̂ · avg(g · x̂)) = rstd · g - x · rstd² · avg(rstd · g · x)
    dweight = Σ_{tokens, heads} (turned-back gradient) · x̂

where, as in `kernels/norm/rows.py`, a fixed set of programs strides over the tokens and adds up dweight in registers, first
all of q, then all of k:

    program 0   q: tokens 0, P, 2P …   → line 0 of q's partial sums      k: the same tokens → line 0 of k's
    program 1   q: tokens 1, P + 1 …   → line 1                          …
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.rope import (
    empty_like_pair,
    heads_of,
    load_angles,
    load_heads,
    load_weight,
    root,
    rows_of_tile,
    store_heads,
    tile_of_heads,
    turn,
    walk,
)
from tilestack.kernels.memory.columns import sum_columns
from tilestack.kernels.tiles import cdiv, multiprocessors, widened

BACK_ELEMENTS, BACK_WARPS = 2048, 4  # of a tile, and of the program that turns it back
BACK_PROGRAMS = 5  # for each multiprocessor, at most: each has a line of partial sums


@triton.jit
def norm_rope_bwd(grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, dx_ptr, partial_ptr,
                  tiles, sequence, heads, table, positions_stride, grad_batch_stride, grad_stride, grad_head_stride,
                  x_batch_stride, x_stride, x_head_stride, dx_batch_stride, dx_stride, dx_head_stride, eps,
                  WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr,
                  TOKENS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
                  REST: tl.constexpr):  # fmt: skip
    """One of q and k: this program's share of the tokens, and its line of dweight."""
    da = tl.zeros([TOKENS * HEADS, WIDTH], ACC)
    db = tl.zeros([TOKENS * HEADS, WIDTH], ACC)
    dc = tl.zeros([TOKENS * HEADS, REST if REST else 1], ACC)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, token, head, inside = rows_of_tile(tile, sequence, HEADS, TOKENS)
        cos, sin = load_angles(
            cos_ptr, sin_ptr, positions_ptr, batch, token, inside, positions_stride, table, WHOLE, ACC, PAIRS, WIDTH
        )
        grads = grad_ptr + batch * grad_batch_stride + token * grad_stride
        xs = x_ptr + batch * x_batch_stride + token * x_stride
        dxs = dx_ptr + batch * dx_batch_stride + token * dx_stride
        for start in range(0, heads, HEADS):
            here = head + start
            first, second, rest = load_heads(
                xs + here * x_head_stride, inside, WHOLE, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST
            )
            turned, other, g_rest = load_heads(
                grads + here * grad_head_stride, inside, WHOLE, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST
            )
            # Loaded here, where the cache has it, rather than held: registers limit how many programs are at work.
            a, b, c = load_weight(weight_ptr, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST)
            rstd = root(first, second, rest, eps, DIM, REST)
            if not WHOLE:
                rstd = tl.where(inside, rstd, 0)  # without an eps it is infinite in rows that do not exist
            g_first = (turned * cos + other * sin) * rstd
            g_second = (other * cos - turned * sin) * rstd
            da += g_first * first
            db += g_second * second
            g_first, g_second = g_first * a, g_second * b
            along = tl.sum(g_first * first + g_second * second, 1, keep_dims=True)
            if REST:
                g_rest = g_rest * rstd
                dc += g_rest * rest
                g_rest = g_rest * c
                along += tl.sum(g_rest * rest, 1, keep_dims=True)
            along = along / DIM * rstd * rstd
            store_heads(
                dxs + here * dx_head_stride, g_first - first * along, g_second - second * along, g_rest - rest * along,
                inside, WHOLE, INTERLEAVED, DIM, PAIRS, WIDTH, REST,
            )  # fmt: skip
    store_heads(
        partial_ptr + tl.program_id(0) * DIM + tl.zeros([1, 1], tl.int32), tl.sum(da, 0, keep_dims=True),
        tl.sum(db, 0, keep_dims=True), tl.sum(dc, 0, keep_dims=True), tl.full([1, 1], True, tl.int1),
        True, INTERLEAVED, DIM, PAIRS, WIDTH, REST,
    )  # fmt: skip


@triton.jit
def norm_rope_bwd_kernel(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
    dq_ptr, dk_ptr, partial_ptr,  # partial: [2, programs, head_dim]
    tiles, sequence, q_heads, k_heads, table, positions_stride,
    q_grad_batch_stride, q_grad_stride, q_grad_head_stride, k_grad_batch_stride, k_grad_stride, k_grad_head_stride,
    q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    dq_batch_stride, dq_stride, dq_head_stride, dk_batch_stride, dk_stride, dk_head_stride, eps,
    WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    norm_rope_bwd(
        q_grad_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, positions_ptr, dq_ptr, partial_ptr,
        tiles, sequence, q_heads, table, positions_stride, q_grad_batch_stride, q_grad_stride, q_grad_head_stride,
        q_batch_stride, q_stride, q_head_stride, dq_batch_stride, dq_stride, dq_head_stride, eps,
        WHOLE, INTERLEAVED, ACC, HEADS, TOKENS, DIM, PAIRS, WIDTH, REST,
    )  # fmt: skip
    norm_rope_bwd(
        k_grad_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, dk_ptr, partial_ptr + tl.num_programs(0) * DIM,
        tiles, sequence, k_heads, table, positions_stride, k_grad_batch_stride, k_grad_stride, k_grad_head_stride,
        k_batch_stride, k_stride, k_head_stride, dk_batch_stride, dk_stride, dk_head_stride, eps,
        WHOLE, INTERLEAVED, ACC, HEADS, TOKENS, DIM, PAIRS, WIDTH, REST,
    )  # fmt: skip


def norm_turn_back(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    out: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
) -> Tensor:
    """Write the gradients of q and k into `out`; returns those of both weights, [2, head_dim]."""
    (batch, sequence, positions_stride), strides = walk(positions, q_grad, k_grad, q, k, *out)
    q_heads, k_heads, (table, pairs) = q.shape[2], k.shape[2], cos.shape
    tile = tile_of_heads(q, k, sequence, pairs, interleaved, BACK_ELEMENTS)
    tiles = batch * cdiv(sequence, tile["TOKENS"])
    rounds = cdiv(max(tiles, 1), BACK_PROGRAMS * multiprocessors(q.device))
    programs = cdiv(max(tiles, 1), rounds)  # as many as share the tiles evenly
    partial = torch.empty((2, programs, q.shape[3]), dtype=widened(q.dtype), device=q.device)
    launch(
        norm_rope_bwd_kernel, (programs if q.shape[3] else 0,),
        q_grad, k_grad, q, k, *(weight.contiguous() for weight in weights), cos.contiguous(), sin.contiguous(),
        None if positions is None else positions.contiguous(), *out, partial,
        tiles, sequence, q_heads, k_heads, table, positions_stride, *strides, float(eps),
        **tile, num_warps=BACK_WARPS,
    )  # fmt: skip
    return sum_columns(partial, weights[0].dtype)


def qk_norm_rope_backward(
    grad_turned_q: Tensor,
    grad_turned_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor | None, ...]:
    dq, dk = empty_like_pair(q, k)
    dweights = norm_turn_back(
        heads_of(grad_turned_q), heads_of(grad_turned_k), heads_of(q), heads_of(k), (dq, dk), (q_weight, k_weight),
        cos, sin, positions, interleaved, eps,
    )  # fmt: skip
    return dq, dk, dweights[0], dweights[1], None, None, None


@implements(ops.qk_norm_rope, backend="triton", repeat=straight_line, backward=qk_norm_rope_backward)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    q, k = heads_of(q), heads_of(k)
    weights = q_weight.contiguous(), k_weight.contiguous()
    return turn(q, k, empty_like_pair(q, k), weights, cos, sin, positions, interleaved, eps)
