"""Queries, keys and values out of one projection, queries and keys turned, with a gradient that needs no concatenation.

    heads    [B, T, q + k + v heads, D]     | q        | k    | v    |     read where it lies
                                              ↓ turn      ↓      ↓
    gradient [B, T, q + k + v heads, D]     | dq       | dk   | dv   |     one new tensor: dq and dk are turned back
                                                                           into it, dv is copied

Split and turned by themselves, dq and dk would be tensors of their own, written once by the kernel and once more by the
concatenation that is the gradient of a split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.qk_norm_rope import norm_turn_back
from tilestack.kernels.attention.rope import (
    empty_like_pair,
    heads_of,
    load_head_columns,
    rows_of_tile,
    store_head_columns,
    tile_of_heads,
    turn,
    walk,
)
from tilestack.kernels.tiles import cdiv

COPY_ELEMENTS, COPY_WARPS = 2048, 4  # of a tile, and of the program that copies it


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
    x = load_head_columns(x_ptr + column, inside, column, WHOLE, DIM, WIDTH)
    store_head_columns(out_ptr + column, x, inside, column, WHOLE, DIM, WIDTH)


def copy_heads(x: Tensor, out: Tensor) -> None:
    (batch, sequence, _), strides = walk(None, x, out)
    tile = tile_of_heads(x, x, sequence, 0, False, COPY_ELEMENTS)
    grid = batch * cdiv(sequence, tile["TOKENS"]), x.shape[2] // tile["HEADS"] if x.shape[3] else 0
    named = {name: tile[name] for name in ("WHOLE", "HEADS", "TOKENS", "DIM")}
    launch(copy_heads_kernel, grid, x, out, sequence, *strides, **named, WIDTH=tile["REST"], num_warps=COPY_WARPS)


def split(heads: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, ...]:
    return heads.split((q_heads, k_heads, heads.shape[2] - q_heads - k_heads), 2)


def qkv_rope_backward(
    grad_turned_q: Tensor,
    grad_turned_k: Tensor,
    grad_v: Tensor,
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_heads: int,
    k_heads: int,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """With norms, whose gradients need the heads that went in; without, for a compiler, which keeps what any call may need."""
    if q_weight is None or k_weight is None:
        return turned_back(grad_turned_q, grad_turned_k, grad_v, cos, sin, positions, q_heads, k_heads)
    grads = heads_of(grad_turned_q), heads_of(grad_turned_k)
    gradient = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    dq, dk, dv = split(gradient, q_heads, k_heads)
    copy_heads(heads_of(grad_v), dv)
    q, k, _ = split(heads_of(heads), q_heads, k_heads)
    dweights = norm_turn_back(
        *grads, q, k, (dq, dk), (q_weight.contiguous(), k_weight.contiguous()), cos, sin, positions, False, eps
    )
    return gradient, *dweights, None, None, None


def turned_back(
    grad_turned_q: Tensor,
    grad_turned_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor | None, ...]:
    """Without norms, of which nothing but the angles is kept."""
    grads = heads_of(grad_turned_q), heads_of(grad_turned_k), heads_of(grad_v)
    batch, sequence, _, head_dim = grads[0].shape
    shape = batch, sequence, sum(grad.shape[2] for grad in grads), head_dim
    gradient = torch.empty(shape, dtype=grads[0].dtype, device=grads[0].device)
    dq, dk, dv = split(gradient, q_heads, k_heads)
    copy_heads(grads[2], dv)
    turn(grads[0], grads[1], (dq, dk), (None, None), cos, sin, positions, False, back=True)
    return gradient, None, None, None, None, None


def turned(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_heads: int,
    k_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split(heads, q_heads, k_heads)
    q, k = heads_of(q), heads_of(k)
    dense = lambda weight: None if weight is None else weight.contiguous()
    weights = dense(q_weight), dense(k_weight)
    return *turn(q, k, empty_like_pair(q, k), weights, cos, sin, positions, False, eps), v


implements(
    ops.qkv_rope,
    backend="triton",
    repeat=straight_line,
    backward=qkv_rope_backward,
    extras=Extras(turned, turned_back, when=lambda q_weight: q_weight is None),
)(turned)
