"""Matrices as the copy engine of Hopper moves them (TMA): rows of elements side by side, each starting on 16 bytes.

A matrix whose columns lie so is moved as its transpose, and turned while it is multiplied, for nothing. What lies in
neither way is copied into rows that are padded to 16 bytes; what is read past the end of a row or column is zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilestack.kernels.tiles import cdiv, shared_memory

ALIGNMENT = 16  # bytes
PIPELINE_BYTES = 200_000  # of shared memory, to hold tiles of three or four steps


class Movable(NamedTuple):
    """A matrix, or a stack of them, for TMA: `rows` is the matrix itself, or its transpose where `turned`."""

    rows: Tensor
    turned: bool


def movable(matrix: Tensor) -> Movable:
    if lies_in_rows(matrix):
        return Movable(matrix, False)
    if lies_in_rows(matrix.mT):
        return Movable(matrix.mT, True)
    return Movable(in_rows(matrix), False)


def in_rows(matrix: Tensor) -> Tensor:
    """The matrix itself where it lies in rows that TMA can move, else a copy that does."""
    return matrix if lies_in_rows(matrix) else empty_rows(*matrix.shape, like=matrix).copy_(matrix)


def lies_in_rows(matrix: Tensor) -> bool:
    *steps, side_by_side = matrix.stride()
    aligned = (
        all(step * matrix.element_size() % ALIGNMENT == 0 for step in steps) and matrix.data_ptr() % ALIGNMENT == 0
    )
    return side_by_side == 1 and aligned and steps[-1] >= matrix.shape[-1] and min(steps) > 0


def empty_rows(*sizes: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """New memory for a matrix or a stack of them that TMA can move: contiguous where that suffices, else of padded rows."""
    *leading, columns = sizes
    dtype = dtype or like.dtype
    multiple = ALIGNMENT // dtype.itemsize
    padded = cdiv(columns, multiple) * multiple
    return torch.empty((*leading, padded), dtype=dtype, device=like.device)[..., :columns]


def can_move(x: Tensor, weight: Tensor) -> bool | str:
    """Whether the GPU has TMA and the shared memory to wait for it, and there is something to move; the interpreter plays
    along."""
    if shared_memory(x.device) < PIPELINE_BYTES:
        return "it needs TMA and more than 200 kB of shared memory: compute capability 9.0 or 10.0"
    return weight.numel() > 0 or "TMA moves no empty matrix"
