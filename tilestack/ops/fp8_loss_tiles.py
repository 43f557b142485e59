"""The gradient of a cross-entropy as fp8 codes both ways, for the products of a head in fp8, which take nothing else.

    logits, lse, labels ──▶ softmax(logits) - [column = label]     as codes, as it lies and turned

A row's sum must be known before its first element, so whoever has the losses hands over lse = loss + logits[label]. The
numbers that are coded are those of float32. Tiles and scales are those of `fp8_tiles`. No gradients.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.fp8_tiles import codes_by, tiles_fit
from tilestack.ops.loss import labels_case
from tilestack.ops.numerics import wide
from tilestack.ops.quantised_linear import E4M3


def loss_tiles_case(make, rows, classes, by, turned_by):
    logits = make.normal(rows, classes, scale=2)
    lse = wide(logits).logsumexp(1)
    return dict(logits=logits, lse=lse) | labels_case(make, (rows,), classes) | dict(by=by, turned_by=turned_by)


def loss_tiles_fit(logits: Tensor, lse: Tensor, labels: Tensor, by: str, turned_by: str) -> bool | str:
    if logits.ndim != 2:
        return f"logits must be a matrix, [rows, classes], not {tuple(logits.shape)}"
    if (found := tiles_fit(logits, by, turned_by)) is not True:
        return found
    if labels.is_floating_point() or labels.shape != logits.shape[:1]:
        return f"labels must be integers of shape {tuple(logits.shape[:1])}, not {labels.dtype} {tuple(labels.shape)}"
    return (
        lse.shape == logits.shape[:1]
        or f"lse has one number a row, shape {tuple(logits.shape[:1])}, not {tuple(lse.shape)}"
    )


@operator(
    cases=cases(
        loss_tiles_case,
        check=[
            (1, 1, "rows", "rows"),
            (130, 40, "rows", "blocks"),
            (64, 260, "blocks", "blocks"),
            (144, 272, "rows", "rows"),
            (131, 5, "blocks", "rows"),
        ],
        bench=[(8192, 151936, "rows", "rows")],
    ),
    cost=lambda logits: Cost(flops=7 * logits.numel()),
    check=loss_tiles_fit,
    outputs=("codes", "scale", "turned", "turned_scale"),
)
def cross_entropy_gradient_fp8_tiles(
    logits: Tensor, lse: Tensor, labels: Tensor, ignore_index: int = -100, by: str = "rows", turned_by: str = "rows"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8_tiles` of exp(logits - lse) - [column = label], the gradient of a sum of losses, which is coded unrounded.

    A row whose label is ignored is zero; one whose label is neither a class nor ignored is NaN.
    """
    label, columns = labels[:, None], torch.arange(logits.shape[1], device=logits.device)
    made = (wide(logits) - wide(lse)[:, None]).exp() - (columns == label).to(torch.float32)
    made = torch.where((label >= 0) & (label < logits.shape[1]), made, torch.nan)
    made = torch.where(label == ignore_index, 0, made)
    return *codes_by(made, by, E4M3), *codes_by(made.mT, turned_by, E4M3)
