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
    """A matrix for TMA: `rows` is the matrix itself, or its transpose where `turned`."""

    rows: Tensor
    turned: bool


def movable(matrix: Tensor) -> Movable:
    if lies_in_rows(matrix):
        return Movable(matrix, False)
    if lies_in_rows(matrix.T):
        return Movable(matrix.T, True)
    rows, columns = matrix.shape
    return Movable(empty_rows(rows, columns, matrix).copy_(matrix), False)


def lies_in_rows(matrix: Tensor) -> bool:
    step, side_by_side = matrix.stride()
    aligned = (step * matrix.element_size() | matrix.data_ptr()) % ALIGNMENT == 0
    return side_by_side == 1 and aligned and step >= matrix.shape[1]


def empty_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """New memory for a matrix that TMA can move: contiguous where that suffices, else with padded rows."""
    multiple = ALIGNMENT // like.element_size()
    padded = cdiv(columns, multiple) * multiple
    return torch.empty((rows, padded), dtype=like.dtype, device=like.device)[:, :columns]


def can_move(x: Tensor, weight: Tensor) -> bool | str:
    """Whether the GPU has TMA and the shared memory to wait for it, and there is something to move; the interpreter plays
    along."""
    if shared_memory(x.device) < PIPELINE_BYTES:
        return "it needs TMA and more than 200 kB of shared memory: compute capability 9.0 or 10.0"
    return weight.numel() > 0 or "TMA moves no empty matrix"
