"""GPTQ: columns are rounded one after another, and what a rounding does to the output is made up for by the columns after it.

For a row w of the weight and inputs x, rounding to ŵ changes the output by (w - ŵ)·x, in the mean of squares

    (w - ŵ) H (w - ŵ)ᵀ,     H = E[x xᵀ].

Let column j be rounded, with the error e = w_j - ŵ_j. The columns F that are still free move to where this is least,

    w_F  ←  w_F - e / [H⁻¹]_jj · [H⁻¹]_jF                  with H of j and F alone,

and by the Cholesky factor of H⁻¹ = Uᵀ U, U upper triangular, those inverses are all there from the beginning:
[H⁻¹]_jF / [H⁻¹]_jj is U_jF / U_jj. Within a block of columns the updates are made at once, those right of it in one product:

    columns   done │ block │ free             for j in block:  block -= e_j U_j,block / U_jj
               ŵ   │ j →   │  ← E · U          at its end:     free  -= E U_block,free,     E_j = e_j / U_jj

The columns of the largest inputs come first, while most others are free to make up for them. Grids are found before, from
the weight as it was, so neighbours share a scale whatever the order, and codes are stored as without it. Frantar et al.,
https://arxiv.org/abs/2210.17323; the order by size of input is of the authors' later code.
"""

import torch
from torch import Tensor

from tilestack.ops.numerics import wide
from tilestack.quant.clipping import clipped_grid
from tilestack.quant.schemes import Codes, Scheme

BLOCK = 128  # columns
DAMPING = 0.01  # of the mean of H's diagonal, added to it
MOST_DAMPING = 1e3


def gptq(weight: Tensor, moments: Tensor, scheme: Scheme, damping: float = DAMPING, block: int = BLOCK) -> Codes:
    """The codes of a weight [out, in] whose inputs have the second moments H, [in, in]."""
    weight = wide(weight.detach())
    inner = weight.shape[1]
    grid = clipped_grid(weight, scheme, moments.diagonal())
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    factor = inverse_factor(moments[order][:, order], damping).to(weight.dtype)
    columns = weight.T[order].contiguous()  # [in, out]: a column of the weight is one piece of memory
    places = order.tolist()
    for begin in range(0, inner, block):
        end = min(begin + block, inner)
        errors = torch.empty_like(columns[begin:end])
        for at in range(begin, end):
            rounded = grid.nearest_in_column(columns[at], places[at], inner)
            errors[at - begin] = (columns[at] - rounded) / factor[at, at]
            columns[at] = rounded
            columns[at + 1 : end].addmm_(factor[at, at + 1 : end, None], errors[at - begin, None], alpha=-1)
        columns[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    return grid.encode(columns[torch.argsort(order)].T.contiguous())


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with Uᵀ U = H⁻¹; H has a little added to its diagonal, more where it is too close to singular.

    Read backwards, H is M Mᵀ with M lower triangular, and U is M⁻¹ read backwards: no inverse of H is needed. An input that was
    always zero says nothing: its column is rounded to nearest and makes up for nothing.
    """
    moments = moments.double()
    diagonal = moments.diagonal()
    dead = diagonal <= 0
    mean = diagonal.mean() if bool((~dead).any()) else torch.ones_like(diagonal[0])
    while True:
        damped = moments + torch.diag(torch.where(dead, mean, damping * mean))
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
            return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
        damping = max(10 * damping, 1e-6)
        if damping > MOST_DAMPING:
            raise ValueError("these are no second moments of inputs: not finite, or not positive however much is added")
