"""Queries, keys and values out of one projection, queries and keys turned to their positions."""

import torch
from torch import Tensor

from tilestack import ops


def split_and_turn(
    heads: Tensor,
    sizes: tuple[int, int, int],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(turned q, turned k, v) of heads, [B, T, q + k + v heads, D], of which there are `sizes`.

    With the weights of `norms`, queries and keys are normalised first. Pairs are as `ops.rope` has them. Where the
    Triton kernels run and pairs are not interleaved, the gradient of heads is written in one piece; compilers see plain
    operators.
    """
    q, k, v = heads.split(sizes, 2)
    turn = cos, sin, positions
    arguments = (q, k, *turn, interleaved) if norms is None else (q, k, *norms, *turn, interleaved, eps)
    operator = ops.rope if norms is None else ops.qk_norm_rope
    named = dict(zip(operator.parameters, arguments, strict=True))
    if not interleaved and in_one_piece(heads) and operator.resolve(named, with_gradient=True).backend == "triton":
        from tilestack.kernels.attention.qkv import SplitAndTurn

        return SplitAndTurn.apply(heads, *(norms or (None, None)), *turn, sizes, eps)
    return *operator(*arguments), v


def in_one_piece(heads: Tensor) -> bool:
    """Whether the gradient of heads is ours to lay out: wanted, not traced, and of a tensor with memory."""
    return (
        torch.is_grad_enabled() and heads.requires_grad and type(heads) is Tensor and not torch.compiler.is_compiling()
    )
