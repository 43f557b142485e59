"""Queries, keys and values out of one projection, queries and keys turned, with a gradient that needs no concatenation.

    heads    [B, T, q + k + v heads, D]     | q        | k    | v    |     read where it lies
                                              ↓ turn      ↓      ↓
    gradient [B, T, q + k + v heads, D]     | dq       | dk   | dv   |     one new tensor: dq and dk are turned back
                                                                           into it, dv is copied

Split and turned by themselves, dq and dk would be tensors of their own, written once by the kernel and once more by the
concatenation that is the gradient of a split.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract.autograd import once_only
from tilestack.contract.launch import launch
from tilestack.kernels.attention.qk_norm_rope import norm_turn_back
from tilestack.kernels.attention.rope import (
    ELEMENTS,
    WARPS,
    heads_of,
    load,
    rows_of_tile,
    store,
    tile_of,
    turn,
    walk,
)
from tilestack.kernels.tiles import cdiv


@triton.jit
def copy_heads_kernel(
    x_ptr, out_ptr,
    sequence, x_batch_stride, x_stride, x_head_stride, out_batch_stride, out_stride, out_head_stride,
    WHOLE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, blocks of heads), tiles as in `kernels/attention/rope.py`."""
    batch, token, head, inside = rows_of_tile(tl.program_id(0), sequence, HEADS, TOKENS)
    head += tl.program_id(1) * HEADS
    column = tl.arange(0, WIDTH)[None, :]
    x_ptr += batch * x_batch_stride + token * x_stride + head * x_head_stride
    out_ptr += batch * out_batch_stride + token * out_stride + head * out_head_stride
    x = load(x_ptr + column, inside, column, WHOLE, DIM, WIDTH)
    store(out_ptr + column, x, inside, column, WHOLE, DIM, WIDTH)


def copy_heads(x: Tensor, out: Tensor) -> None:
    (batch, sequence, _), strides = walk(None, x, out)
    tile = tile_of(x, x, sequence, 0, False, ELEMENTS)
    grid = batch * cdiv(sequence, tile["TOKENS"]), x.shape[2] // tile["HEADS"] if x.shape[3] else 0
    named = {name: tile[name] for name in ("WHOLE", "HEADS", "TOKENS", "DIM")}
    launch(copy_heads_kernel, grid, x, out, sequence, *strides, **named, WIDTH=tile["REST"], num_warps=WARPS)


class SplitAndTurn(torch.autograd.Function):
    """(turned q, turned k, v) of heads, normalised first where there are weights. A view of heads is the v."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        sizes: tuple[int, int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads.split(sizes, 2)
        ctx.sizes, ctx.eps, ctx.shape = sizes, eps, heads.shape
        if q_weight is None or k_weight is None:
            ctx.save_for_backward(cos, sin, positions, None, None, None)
            return *ops.rope(q, k, cos, sin, positions), v
        ctx.save_for_backward(cos, sin, positions, heads, q_weight, k_weight)
        return *ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, positions, eps=eps), v

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = gradients_of(ctx, *map(heads_of, arriving))
        if torch.is_grad_enabled():
            operator = ops.rope if found[1] is None else ops.qk_norm_rope
            found = once_only(operator.implementations["triton"], found, (*arriving, *ctx.saved_tensors))
        return *found, None, None, None, None, None


def gradients_of(ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of heads and of the norms' weights."""
    cos, sin, positions, heads, q_weight, k_weight = ctx.saved_tensors
    gradient = torch.empty(ctx.shape, dtype=q_grad.dtype, device=q_grad.device)
    dq, dk, dv = gradient.split(ctx.sizes, 2)
    copy_heads(v_grad, dv)
    if heads is None:
        turn(q_grad, k_grad, (dq, dk), (None, None), cos, sin, positions, False, back=True)
        return gradient, None, None
    q, k, _ = heads_of(heads).split(ctx.sizes, 2)
    dweights = norm_turn_back(q_grad, k_grad, q, k, (dq, dk), (q_weight, k_weight), cos, sin, positions, False, ctx.eps)
    return gradient, dweights[0], dweights[1]
