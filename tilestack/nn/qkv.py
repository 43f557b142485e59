"""Queries, keys and values out of one projection, queries and keys turned to their positions."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.invariance import invariant_wanted


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
    # Of interleaved pairs there is no joint operator; compilers make new memory of results, and a view of heads is cheaper.
    if interleaved or torch.compiler.is_compiling() or invariant_wanted():
        q, k, v = heads.split(sizes, 2)
        if norms is not None and invariant_wanted():  # the joint operator does not promise it
            q, k, norms = ops.rms_norm(q, norms[0], eps), ops.rms_norm(k, norms[1], eps), None
        if norms is None:
            return *ops.rope(q, k, cos, sin, positions, interleaved), v
        return *ops.qk_norm_rope(q, k, *norms, cos, sin, positions, interleaved, eps), v
    q_weight, k_weight = norms or (None, None)
    return ops.qkv_rope(heads, q_weight, k_weight, cos, sin, positions, sizes[0], sizes[1], eps)
