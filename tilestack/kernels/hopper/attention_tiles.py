"""What the forward and backward of attention on Hopper share: how tensors lie, and the order of programs."""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestack.contract.descriptors import Tile


@gluon.jit
def place_in_bands(number, heads, blocks, AT_A_TIME: gl.constexpr):
    """(head, block) of the tile with this number: AT_A_TIME heads together, which share the L2, block after block."""
    first = number // (AT_A_TIME * blocks) * AT_A_TIME
    within = number % (AT_A_TIME * blocks)
    together = gl.minimum(AT_A_TIME, heads - first)
    return first + within % together, within // together


def by_rows(x: Tensor) -> Tensor:
    """x, [batch, tokens, heads, dim], itself where a token's heads lie side by side and rows start on 16 bytes, else a copy."""
    side_by_side = x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
    places = x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:2])
    aligned = not any(place % 16 for place in places) and min(x.stride()[:2]) > 0
    return x if side_by_side and aligned else x.clone(memory_format=torch.contiguous_format)


def tiles_of(x: Tensor, rows: int, columns: int | None = None) -> Tile:
    """What TMA has to know of x, [batch, tokens, heads, dim], to move tiles of some tokens and columns of one head, or all."""
    batch, tokens, heads, dim = x.shape
    block = (1, rows, columns or dim)
    return Tile(x, (batch, tokens, heads * dim), (x.stride(0), x.stride(1), 1), block, layout_of(block, x.dtype))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
