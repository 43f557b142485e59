"""Softmax over part of a row: the part a mask shows, or that on and below a diagonal.

What is excluded counts as a score of -inf and comes out as exactly zero, whatever it held, NaN too. A row that shows
nothing is all zeros (PyTorch's softmax of nothing but -inf is NaN), so that padding needs no care.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide
from tilestack.ops.softmax import softmax_gradient

SCORES = [(8, 1024, 1024), (4, 4096, 4096), (64, 2048, 2048), (1, 4096, 16384)]


def softmax_over(scores: Tensor, seen: Tensor) -> Tensor:
    if not scores.numel():
        return scores
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    shifted = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = shifted.sum(-1, keepdim=True)
    return torch.where(seen, shifted / total.masked_fill(total == 0, 1), 0)


def masked_case(make, *size):
    """Three quarters of the scores shown, none of the first row; the mask has ones in place of some of x's dimensions."""
    *shape, shared = size
    of_mask = [1 if str(place) in str(shared) else length for place, length in enumerate(shape)]
    mask = make.integers(*of_mask, high=4) > 0
    mask[(slice(1),) * (len(shape) - 1)] = False
    return dict(x=make.normal(*shape, scale=4), mask=mask)


def shows_scores(x: Tensor, mask: Tensor) -> bool | str:
    if mask.dtype != torch.bool:
        return f"mask must be boolean, True where a score counts, not {mask.dtype}"
    fits = 0 < x.ndim >= mask.ndim and all(
        length in (1, whole) for length, whole in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    return fits or f"a mask of shape {tuple(mask.shape)} does not broadcast to x of shape {tuple(x.shape)}"


def masked_softmax_gradient(grad: Tensor, out: Tensor) -> tuple[Tensor, None]:
    return softmax_gradient(grad, out, -1), None


@operator(
    cases=cases(
        masked_case,
        check=[
            (1, 1, "-"), (3, 33, "-"), (4, 128, 0), (5, 1000, "-"), (3, 0, "-"), (0, 16, "-"), (40, "-"),
            (2, 3, 5, 40, 1), (2, 3, 5, 33, 12), (2, 3, 4, 17, 0), (2, 2, 2, 3, 24, "02"), (4, 12, 1), (1, 33000, "-"),
            (4, 48, "-"), (2, 3, 5, 48, 1),
        ],
        bench=[(4, 16, 2048, 2048, 1), (4, 16, 2048, 2048, 12), (8192, 4096, "-"), (2048, 65536, "-")],
    ),
    cost=lambda x: Cost(flops=6 * x.numel(), backward_flops=4 * x.numel()),
    check=shows_scores,
    gradient=masked_softmax_gradient,
)  # fmt: skip
def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """Softmax along the last dimension over the scores where mask, broadcast to x, is True; zero elsewhere.

    A row without any is all zeros. The gradient needs only the output.
    """
    return softmax_over(wide(x), mask.expand(x.shape)).to(x.dtype)


def at_or_below_diagonal(x: Tensor) -> Tensor:
    """[rows, columns]: whether row i sees column j, j ≤ i + columns - rows; the last row sees all."""
    rows, columns = x.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows)


def causal_cost(x: Tensor) -> Cost:
    """What is above the diagonal is never read, neither of the scores nor of what arrives, but written as zeros."""
    rows, columns = x.shape[-2:]
    count = sum(max(0, i + 1 + columns - rows) for i in range(rows)) * x.shape[:-2].numel()
    seen = torch.empty(count, dtype=x.dtype, device="meta")
    return Cost(flops=6 * count, backward_flops=5 * count, read=[seen], backward_read=[seen], arriving=[seen])


def causal_softmax_gradient(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    seen = at_or_below_diagonal(out)
    wide_grad = torch.where(seen, wide(grad), 0)
    inner = (wide_grad * wide(out)).sum(-1, keepdim=True)
    return torch.where(seen, scale * wide(out) * (wide_grad - inner), 0).to(out.dtype)


def causal_case(make, *size):
    *shape, scale = size
    return dict(x=make.normal(*shape, scale=4), scale=scale)


@operator(
    cases=cases(
        causal_case,
        check=[
            (1, 1, 1.0), (33, 33, 0.5), (3, 20, 20, 0.125), (2, 2, 5, 40, 1.0), (40, 7, 1.0), (2, 130, 129, 0.25),
            (0, 4, 4, 1.0), (4, 0, 1.0), (0, 4, 1.0), (2, 33000, 1.0),
        ],
        bench=[(*shape, 0.125) for shape in SCORES],
    ),
    cost=causal_cost,
    check=lambda x: x.ndim >= 2 or f"x must be matrices of scores, [..., rows, columns], not of shape {tuple(x.shape)}",
    gradient=causal_softmax_gradient,
)  # fmt: skip
def causal_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of scale * x along the last dimension, where row i of [rows, columns] sees columns up to i + columns - rows.

    The last row sees all; a row that sees nothing (rows > columns) is all zeros. The gradient needs only the output.
    """
    return softmax_over(scale * wide(x), at_or_below_diagonal(x)).to(x.dtype)
