"""Rotary embedding of q and k in one launch, alone or after an RMSNorm of every head.

A program takes one token and a block of heads, of q or of k; its angles are two short rows of the tables.

              head_dim ->                           interleaved:
    heads     +---------+---------+-------+         +-----------------+-------+
      |       | first   | second  | rest  |         | f s f s f s f s | rest  |
      v       +---------+---------+-------+         +-----------------+-------+
              first · cos - second · sin, second · cos + first · sin, the rest copied

Turning back by the same angle is the gradient. With the norm, x̂ = x / rms(x) and g = (turned-back gradient) · weight,

    dx = rstd · (g - x̂ · avg(g · x̂))        dweight = Σ_{tokens, heads} (turned-back gradient) · x̂

where, as in `kernels/norm.py`, a fixed set of programs strides over the blocks and adds up dweight in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.columns import sum_columns
from tilestack.kernels.launch import accumulator, cdiv, launch, multiprocessors, next_power
from tilestack.kernels.repeat import straight
from tilestack.ops import implements

ELEMENTS = 2048  # of a block of heads


@triton.jit
def load_heads(ptr, offsets, inside, pairs, head_dim, INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
               HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """First and second elements of the pairs, and the rest, of the heads at these offsets; a weight is one head."""
    pair = tl.arange(0, PAIRS)[None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(ptr + offsets + both, mask=inside & (both < 2 * pairs), other=0).to(ACC)
        first, second = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
    else:
        first = tl.load(ptr + offsets + pair, mask=inside & (pair < pairs), other=0).to(ACC)
        second = tl.load(ptr + offsets + pairs + pair, mask=inside & (pair < pairs), other=0).to(ACC)
    column = 2 * pairs + tl.arange(0, REST)[None, :]
    rest = tl.load(ptr + offsets + column, mask=inside & (column < head_dim), other=0).to(ACC)
    return first, second, rest


@triton.jit
def store_heads(ptr, offsets, inside, first, second, rest, pairs, head_dim, INTERLEAVED: tl.constexpr,
                HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    dtype = ptr.dtype.element_ty
    pair = tl.arange(0, PAIRS)[None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.reshape(tl.join(first, second), [HEADS, 2 * PAIRS])
        tl.store(ptr + offsets + both, x.to(dtype), mask=inside & (both < 2 * pairs))
    else:
        tl.store(ptr + offsets + pair, first.to(dtype), mask=inside & (pair < pairs))
        tl.store(ptr + offsets + pairs + pair, second.to(dtype), mask=inside & (pair < pairs))
    column = 2 * pairs + tl.arange(0, REST)[None, :]
    tl.store(ptr + offsets + column, rest.to(dtype), mask=inside & (column < head_dim))


@triton.jit
def load_angles(cos_ptr, sin_ptr, positions_ptr, batch, place, positions_stride, table, pairs,
                HAS_POSITIONS: tl.constexpr, ACC: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """A token's cosines and sines, NaN where its position is outside the tables."""
    position = place.to(tl.int64)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + batch * positions_stride + place).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    known = (position >= 0) & (position < table)
    wanted = pair < pairs
    cos = tl.load(cos_ptr + position * pairs + pair, mask=wanted & known, other=0).to(ACC)
    sin = tl.load(sin_ptr + position * pairs + pair, mask=wanted & known, other=0).to(ACC)
    return tl.where(wanted & (not known), float("nan"), cos), tl.where(wanted & (not known), float("nan"), sin)


@triton.jit
def root(first, second, rest, head_dim, eps):
    """1 / rms of each head."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
    return tl.rsqrt(squares / head_dim + eps)[:, None]


@triton.jit
def turn_block(x_ptr, weight_ptr, out_ptr, cos, sin, block, heads, x_stride, out_stride, pairs, head_dim, eps,
               NORM: tl.constexpr, IN_PLACE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
               HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    head = block * HEADS + tl.arange(0, HEADS).to(tl.int64)[:, None]
    inside = head < heads
    first, second, rest = load_heads(
        x_ptr, head * x_stride, inside, pairs, head_dim, INTERLEAVED, ACC, HEADS, PAIRS, REST
    )
    if NORM:
        rstd = root(first, second, rest, head_dim, eps)
        a, b, c = load_heads(
            weight_ptr, tl.zeros([1, 1], tl.int64), True, pairs, head_dim, INTERLEAVED, ACC, 1, PAIRS, REST
        )
        first, second, rest = first * rstd * a, second * rstd * b, rest * rstd * c
    if IN_PLACE:
        tl.debug_barrier()  # threads that share an element must all have read it
    store_heads(
        out_ptr, head * out_stride, inside, first * cos - second * sin, second * cos + first * sin, rest,
        pairs, head_dim, INTERLEAVED, HEADS, PAIRS, REST,
    )  # fmt: skip


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    sequence, q_heads, k_heads, head_dim, pairs, table, positions_stride,
    q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    q_out_batch_stride, q_out_stride, q_out_head_stride, k_out_batch_stride, k_out_stride, k_out_head_stride, eps,
    BACK: tl.constexpr, NORM: tl.constexpr, IN_PLACE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of q's heads followed by blocks of k's); BACK turns the other way."""
    batch = (tl.program_id(0) // sequence).to(tl.int64)
    place = (tl.program_id(0) % sequence).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, positions_ptr, batch, place, positions_stride, table, pairs, HAS_POSITIONS, ACC, PAIRS
    )
    if BACK:
        sin = -sin
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        turn_block(
            q_ptr + batch * q_batch_stride + place * q_stride, q_weight_ptr,
            q_out_ptr + batch * q_out_batch_stride + place * q_out_stride, cos, sin, block, q_heads,
            q_head_stride, q_out_head_stride, pairs, head_dim, eps, NORM, IN_PLACE, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip
    else:
        turn_block(
            k_ptr + batch * k_batch_stride + place * k_stride, k_weight_ptr,
            k_out_ptr + batch * k_out_batch_stride + place * k_out_stride, cos, sin, block - q_blocks, k_heads,
            k_head_stride, k_out_head_stride, pairs, head_dim, eps, NORM, IN_PLACE, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip


@triton.jit
def norm_rope_bwd(grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, dx_ptr, partial_ptr,
                  tokens, sequence, heads, head_dim, pairs, table, positions_stride,
                  grad_batch_stride, grad_stride, grad_head_stride, x_batch_stride, x_stride, x_head_stride, eps,
                  HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr,
                  PAIRS: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """One of q and k: this program's share of the blocks, and its line of dweight."""
    a, b, c = load_heads(
        weight_ptr, tl.zeros([1, 1], tl.int64), True, pairs, head_dim, INTERLEAVED, ACC, 1, PAIRS, REST
    )
    da = tl.zeros([HEADS, PAIRS], ACC)
    db = tl.zeros([HEADS, PAIRS], ACC)
    dc = tl.zeros([HEADS, REST], ACC)
    blocks = tl.cdiv(heads, HEADS)
    for work in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        token = (work // blocks).to(tl.int64)
        batch = token // sequence
        place = token % sequence
        head = (work % blocks) * HEADS + tl.arange(0, HEADS).to(tl.int64)[:, None]
        inside = head < heads
        cos, sin = load_angles(
            cos_ptr, sin_ptr, positions_ptr, batch, place, positions_stride, table, pairs, HAS_POSITIONS, ACC, PAIRS
        )
        turned, other, g_rest = load_heads(
            grad_ptr + batch * grad_batch_stride + place * grad_stride, head * grad_head_stride, inside,
            pairs, head_dim, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip
        first, second, rest = load_heads(
            x_ptr + batch * x_batch_stride + place * x_stride, head * x_head_stride, inside,
            pairs, head_dim, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip
        g_first = turned * cos + other * sin
        g_second = other * cos - turned * sin
        rstd = root(first, second, rest, head_dim, eps)
        first, second, rest = first * rstd, second * rstd, rest * rstd
        da += g_first * first
        db += g_second * second
        dc += g_rest * rest
        g_first, g_second, g_rest = g_first * a, g_second * b, g_rest * c
        along = tl.sum(g_first * first, 1) + tl.sum(g_second * second, 1) + tl.sum(g_rest * rest, 1)
        along = (along / head_dim)[:, None]
        store_heads(
            dx_ptr + token * heads * head_dim, head * head_dim, inside, (g_first - first * along) * rstd,
            (g_second - second * along) * rstd, (g_rest - rest * along) * rstd,
            pairs, head_dim, INTERLEAVED, HEADS, PAIRS, REST,
        )  # fmt: skip
    store_heads(
        partial_ptr + tl.program_id(0) * head_dim, tl.zeros([1, 1], tl.int64), True, tl.sum(da, 0, keep_dims=True),
        tl.sum(db, 0, keep_dims=True), tl.sum(dc, 0, keep_dims=True), pairs, head_dim, INTERLEAVED, 1, PAIRS, REST,
    )  # fmt: skip


@triton.jit
def norm_rope_bwd_kernel(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
    dq_ptr, dk_ptr, partial_ptr,
    tokens, sequence, q_heads, k_heads, head_dim, pairs, table, positions_stride,
    q_grad_batch_stride, q_grad_stride, q_grad_head_stride, k_grad_batch_stride, k_grad_stride, k_grad_head_stride,
    q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride, eps,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Grid (P, 2): q, then k; partial is [2, P, head_dim]."""
    if tl.program_id(1) == 0:
        norm_rope_bwd(
            q_grad_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, positions_ptr, dq_ptr, partial_ptr,
            tokens, sequence, q_heads, head_dim, pairs, table, positions_stride, q_grad_batch_stride, q_grad_stride,
            q_grad_head_stride, q_batch_stride, q_stride, q_head_stride, eps,
            HAS_POSITIONS, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip
    else:
        norm_rope_bwd(
            k_grad_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, dk_ptr,
            partial_ptr + tl.num_programs(0) * head_dim,
            tokens, sequence, k_heads, head_dim, pairs, table, positions_stride, k_grad_batch_stride, k_grad_stride,
            k_grad_head_stride, k_batch_stride, k_stride, k_head_stride, eps,
            HAS_POSITIONS, INTERLEAVED, ACC, HEADS, PAIRS, REST,
        )  # fmt: skip


def heads_of(x: Tensor) -> Tensor:
    """x with each head contiguous; copied only if its strides demand it."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def positions_of(positions: Tensor | None) -> tuple[Tensor | None, int]:
    """Positions with each sequence's contiguous, and the step from one sequence to the next."""
    if positions is None:
        return None, 0
    positions = positions.contiguous()
    return positions, positions.shape[1] if positions.ndim == 2 else 0


def block_of_heads(q: Tensor, k: Tensor, pairs: int, interleaved: bool) -> dict:
    head_dim = q.shape[3]
    most = max(1, ELEMENTS // next_power(head_dim))
    return dict(
        INTERLEAVED=interleaved,
        ACC=accumulator(q.dtype),
        HEADS=min(next_power(max(q.shape[2], k.shape[2], 1)), most),
        PAIRS=next_power(max(pairs, 1)),
        REST=next_power(max(head_dim - 2 * pairs, 1)),
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
    batch, sequence, q_heads, head_dim = q.shape
    k_heads, (table, pairs) = k.shape[2], cos.shape
    positions, positions_stride = positions_of(positions)
    constants = block_of_heads(q, k, pairs, interleaved)
    blocks = cdiv(q_heads, constants["HEADS"]) + cdiv(k_heads, constants["HEADS"])
    launch(
        rope_kernel, (batch * sequence, blocks if head_dim else 0),
        q, k, *weights, cos.contiguous(), sin.contiguous(), positions, *out,
        sequence, q_heads, k_heads, head_dim, pairs, table, positions_stride,
        *q.stride()[:3], *k.stride()[:3], *out[0].stride()[:3], *out[1].stride()[:3], float(eps),
        BACK=back, NORM=weights[0] is not None, IN_PLACE=out[0] is q, HAS_POSITIONS=positions is not None,
        **constants, num_warps=4,
    )  # fmt: skip
    return out


def fresh(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
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
    dq, dk = turn(q, k, fresh(q, k), (None, None), cos, sin, positions, interleaved, back=True)
    return dq, dk, None, None, None


@implements(ops.rope, backend="triton", repeat=straight, backward=rope_backward)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    q, k = heads_of(q), heads_of(k)
    return turn(q, k, fresh(q, k), (None, None), cos, sin, positions, interleaved)


def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`ops.rope` written over q and k, for inference: no gradient, no new memory. Returns q and k."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("rope_ overwrites q and k and has no gradient; call it under torch.no_grad(), or ops.rope")
    arguments = ops.rope.bind(q, k, cos, sin, positions, interleaved)
    ops.rope.validate(arguments)
    if ops.rope.resolve(arguments).backend == "triton" and heads_of(q) is q and heads_of(k) is k:
        return turn(q, k, (q, k), (None, None), cos, sin, positions, interleaved)
    turned = ops.rope(**arguments)
    return q.copy_(turned[0]), k.copy_(turned[1])


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
    q_grad, k_grad, q, k = heads_of(grad_turned_q), heads_of(grad_turned_k), heads_of(q), heads_of(k)
    batch, sequence, q_heads, head_dim = q.shape
    tokens, k_heads, (table, pairs) = batch * sequence, k.shape[2], cos.shape
    positions, positions_stride = positions_of(positions)
    dq, dk = fresh(q, k)
    constants = block_of_heads(q, k, pairs, interleaved)
    programs = min(max(tokens * cdiv(max(q_heads, k_heads), constants["HEADS"]), 1), multiprocessors(q.device) * 4)
    scratch = torch.float64 if q.dtype == torch.float64 else torch.float32
    partial = torch.empty((2, programs, head_dim), dtype=scratch, device=q.device)
    launch(
        norm_rope_bwd_kernel, (programs, 2),
        q_grad, k_grad, q, k, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(), sin.contiguous(),
        positions, dq, dk, partial, tokens, sequence, q_heads, k_heads, head_dim, pairs, table, positions_stride,
        *q_grad.stride()[:3], *k_grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], float(eps),
        HAS_POSITIONS=positions is not None, **constants, num_warps=4,
    )  # fmt: skip
    summed = sum_columns(partial, q_weight.dtype)
    return dq, dk, summed[0], summed[1], None, None, None


@implements(ops.qk_norm_rope, backend="triton", repeat=straight, backward=qk_norm_rope_backward)
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
    return turn(q, k, fresh(q, k), weights, cos, sin, positions, interleaved, eps)
