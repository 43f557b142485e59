"""Round to nearest with clipping: the grid of each group reaches just as far as makes its error smallest.

A few large numbers in a group stretch its grid, and all others pay for it with coarser steps. For each group, of the grids
that reach 1, 0.975, … 0.5 of the way to the largest number, the one with the least

    Σ_j  E[x_j²] · (w_j - nearest(w_j))²

is kept. With the inputs' second moments E[x_j²] that is the error of the layer's output, as far as inputs are independent of
each other; without calibration they count alike.
"""

import torch
from torch import Tensor

from tilestack.ops.numerics import wide
from tilestack.quant.grid import Grid, grid_of
from tilestack.quant.schemes import Scheme

REACHES = [1 - 0.025 * step for step in range(21)]


def clipped_grid(weight: Tensor, scheme: Scheme, squares: Tensor | None = None) -> Grid:
    """The grids of a weight [out, in] with the least error; `squares` are the mean squares of its inputs, [in]."""
    weight = wide(weight.detach())
    best = grid_of(weight, scheme)
    least = group_errors(best, weight, squares)
    scale, zero = best.scale, best.zero
    for reach in REACHES[1:]:
        grid = grid_of(weight, scheme, reach)
        errors = group_errors(grid, weight, squares)
        better = errors < least
        least = torch.where(better, errors, least)
        scale, zero = torch.where(better, grid.scale, scale), torch.where(better, grid.zero, zero)
    return Grid(scheme, scale, zero)


def group_errors(grid: Grid, weight: Tensor, squares: Tensor | None) -> Tensor:
    """The squared error of each group, [out, groups], each number's by what its input amounts to."""
    errors = (grid.nearest(weight) - weight).square()
    errors = errors if squares is None else errors * squares.to(errors)
    return errors.unflatten(1, (grid.scale.shape[1], -1)).sum(-1)
