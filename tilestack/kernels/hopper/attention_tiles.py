"""What the forward and backward of attention on Hopper share: how tensors lie, and the order of programs.

To TMA a tensor is [batch, heads, tokens, dim], whatever lies beside what, and a tile is some tokens of one head. It asks of
strides only that they are whole multiples of 16 bytes, so that heads may lie within tokens, tokens within heads, or all of
them within a projection of queries, keys and values together.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestack.contract.descriptors import Tile
from tilestack.kernels.hopper.matmul import layout_of

TMA_BYTES = 16  # that all it moves begins on


@gluon.jit
def place_in_bands(number, heads, blocks, AT_A_TIME: gl.constexpr):
    """(head, block) of the tile with this number: AT_A_TIME heads together, which share the L2, block after block."""
    first = number // (AT_A_TIME * blocks) * AT_A_TIME
    within = number % (AT_A_TIME * blocks)
    together = gl.minimum(AT_A_TIME, heads - first)
    return first + within % together, within // together


def as_tma_reads(x: Tensor) -> Tensor:
    """x, [batch, tokens, heads, dim], itself where TMA can read it, else a copy."""
    apart = [stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    places = x.data_ptr(), *(stride * x.element_size() for stride in apart)
    readable = x.stride(3) == 1 and 0 not in apart and not any(place % TMA_BYTES for place in places)
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def empty_as(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dense memory of x's shape, [batch, tokens, heads, dim]: a head's tokens side by side where x has them so, else a token's
    heads."""
    _, tokens, heads, dim = x.shape
    heads_first = min(tokens, heads) > 1 and x.stride(2) > x.stride(1)
    within = (dim, tokens * dim) if heads_first else (heads * dim, dim)
    return torch.empty_strided(x.shape, (tokens * heads * dim, *within, 1), dtype=dtype or x.dtype, device=x.device)


def tiles_of(x: Tensor, rows: int, columns: int | None = None) -> Tile:
    """What TMA has to know of x, [batch, tokens, heads, dim], to move tiles of some tokens and columns of one head, or all."""
    batch, tokens, heads, dim = x.shape
    block = (1, 1, rows, columns or dim)
    # Along a dimension of one element any stride may stand, also one that TMA would refuse.
    strides = [stride if size > 1 else dim for stride, size in zip(x.stride()[:3], x.shape, strict=False)]
    lies = (strides[0], strides[2], strides[1], 1)
    return Tile(x, (batch, heads, tokens, dim), lies, block, layout_of(block, x.dtype))
