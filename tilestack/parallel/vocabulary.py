"""The loss of a head whose words are divided among ranks; no rank ever has all logits of a row.

Rank r scores its own words and knows lse_r, the log-sum-exp of those. With w_r = exp(lse_r - lse) the rest is small:

    lse          = log Σ_r exp(lse_r)                          two numbers of a row from each rank:
    loss         = lse - score of the label                    exp(lse_r - largest), and the label's score or 0
    d loss / ds  = w_r softmax_r(s) - [s is the label's]       each for its own words

`ops.cross_entropy` on a rank's words against any one of them (the label where the rank has it) is lse_r less that word's
score, and its gradient is softmax_r - [that word]. So the local operator does the work, forward and backward, and one element
a row, that word's, is written anew. As in `linear_cross_entropy`, rows go in chunks, and gradients of a sum are made in the
forward: what arrives from above is one number. Gradients of single losses need what arrives for each, so their backward makes
the logits again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.kernels.loss.linear_cross_entropy import rows_per_chunk
from tilestack.ops.numerics import wide

IGNORED = -100


def vocabulary_loss(
    x: Tensor, weight: Tensor, labels: Tensor, softcap: float, start: int, vocabulary: int, group: dist.ProcessGroup
) -> Tensor:
    """The sum of -log softmax(x @ all weights.T)[label] over the labels [...] of x [..., H] that are not ignored. `weight`
    are the rows of this rank, from `start` on, of `vocabulary` in all. The gradient of x is this rank's part."""
    return VocabularyLoss.apply(
        x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), softcap, start, vocabulary, group
    )


class VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, labels, softcap, start, vocabulary, group):  # type: ignore[override]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_x else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        total = wide(x.new_zeros(()))
        place = softcap, start, vocabulary, group
        for part, losses, dlogits in in_chunks(x, weight, labels, *place, wanted=needs_x or needs_weight):
            total += losses.sum()
            if dx is not None:
                dx[part] = dlogits @ weight
            if dweight is not None:
                dweight.addmm_(dlogits.T, x[part])
        ctx.save_for_backward(dx, dweight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        # A factor of one dimension is multiplied as it is; rounded to bfloat16, 1 / count would be off in all gradients.
        scaled = (
            None if made is None else torch.mul(made, grad[None], out=torch.empty_like(made))
            for made in ctx.saved_tensors
        )
        return *scaled, *(None for _ in range(5))


def vocabulary_losses(
    x: Tensor, weight: Tensor, labels: Tensor, softcap: float, start: int, vocabulary: int, group: dist.ProcessGroup
) -> Tensor:
    """The terms of `vocabulary_loss`, of the shape of the labels: 0 where a label is ignored."""
    flat = x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1)
    return VocabularyLosses.apply(*flat, softcap, start, vocabulary, group).view(labels.shape)


class VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, labels, softcap, start, vocabulary, group):  # type: ignore[override]
        ctx.save_for_backward(x, weight, labels)
        ctx.place = softcap, start, vocabulary, group
        return torch.cat([losses for _, losses, _ in in_chunks(x, weight, labels, *ctx.place, wanted=False)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight, labels = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_x else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        for part, _, dlogits in in_chunks(x, weight, labels, *ctx.place, wanted=True):
            scaled = dlogits * grad[part, None].to(dlogits.dtype)
            if dx is not None:
                dx[part] = scaled @ weight
            if dweight is not None:
                dweight.addmm_(scaled.T, x[part])
        return dx, dweight, *(None for _ in range(5))


def in_chunks(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float,
    start: int,
    vocabulary: int,
    group: dist.ProcessGroup,
    *,
    wanted: bool,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: which, their losses, and the gradient of the sum of those, where that is wanted. All ranks take as
    many, or their sums would be of different rows: what suits the largest share of the words, which may differ by one."""
    most = -(-vocabulary // group.size())
    size = rows_per_chunk(len(x), weight.new_empty(most, 0))
    for first in range(0, len(x), size):
        part = slice(first, first + size)
        logits = ops.linear(x[part], weight)
        yield part, *losses_and_gradient(logits, labels[part], softcap, start, vocabulary, group, wanted)


def losses_and_gradient(
    logits: Tensor, labels: Tensor, softcap: float, start: int, vocabulary: int, group: dist.ProcessGroup, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and by this rank's logits [rows, words] the gradient of their sum, where that is wanted."""
    words = logits.shape[1]
    valid = labels != IGNORED
    mine = valid & (labels >= start) & (labels < start + words)
    place = (labels - start).clamp(0, words - 1).long()[:, None]
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(wanted)
        against = torch.where(valid, place[:, 0], IGNORED)  # no loss and no gradient of a row that is ignored
        local = ops.cross_entropy(leaf, against, IGNORED, softcap=softcap, reduction="none")
    score = wide(logits.gather(1, place)[:, 0])
    slope = torch.ones_like(score)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
        slope = 1 - (score / softcap).square()
    own = torch.where(valid, local.detach() + score, 0)  # lse_r
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = torch.stack([(own - largest).exp(), torch.where(mine, score, 0)])
    dist.all_reduce(sums, group=group)
    lse = largest + sums[0].log()
    known = torch.where((labels >= 0) & (labels < vocabulary), 1.0, torch.nan).to(lse.dtype)
    losses = torch.where(valid, (lse - sums[1]) * known, 0)
    if not wanted:
        return losses, logits
    weight = torch.where(valid, (own - lse).exp() * known, 0)  # w_r
    (dlogits,) = torch.autograd.grad(local, leaf, weight.to(local.dtype))
    exact = torch.where(valid, ((score - lse).exp() - mine.to(lse.dtype)) * slope * known, 0)
    return losses, dlogits.scatter_(1, place, exact.to(dlogits.dtype)[:, None])
