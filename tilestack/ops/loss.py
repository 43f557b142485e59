"""The loss of a language model: cross-entropy over a vocabulary, alone and fused with the layer that makes the logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import lower_when_traced, lowered
from tilestack.ops.numerics import named_rows_exist, wide

REDUCTIONS = ("mean", "sum", "none")


def options_fit(
    label_smoothing: float, z_loss: float, softcap: float, reduction: str, labels: Tensor, rows: torch.Size, V: int
) -> bool | str:
    if labels.is_floating_point() or labels.shape != rows:
        return f"labels must be integers of shape {tuple(rows)}, not {labels.dtype} {tuple(labels.shape)}"
    if V == 0:
        return "there must be at least one class"
    if reduction not in REDUCTIONS:
        return f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing is a share between 0 and 1, not {label_smoothing}"
    return (z_loss >= 0 and softcap >= 0) or f"z_loss ({z_loss}) and softcap ({softcap}) must not be negative"


def logits_fit(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, softcap: float, reduction: str
) -> bool | str:
    if logits.ndim == 0:
        return "logits need a last dimension, the classes"
    return options_fit(label_smoothing, z_loss, softcap, reduction, labels, logits.shape[:-1], logits.shape[-1])


def head_fits(
    x: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, softcap: float, reduction: str
) -> bool | str:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        return (
            "x ends in H and weight is [V, H], both of one dtype, "
            f"but x is {x.dtype} {tuple(x.shape)} and weight is {weight.dtype} {tuple(weight.shape)}"
        )
    return options_fit(label_smoothing, z_loss, softcap, reduction, labels, x.shape[:-1], weight.shape[0])


# The options of the loss, by the name that ends a case's: `5x65xsmooth`.
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "smooth": dict(label_smoothing=0.1),
    "z": dict(z_loss=1e-2),
    "softcap": dict(softcap=15.0),
    "all": dict(label_smoothing=0.1, z_loss=1e-2, softcap=15.0, reduction="none"),
}


def labels_case(make, rows, classes, ignored=slice(1, None, 3)):
    """Labels of which every third, from the second on, is ignored."""
    labels = make.integers(*rows, high=classes)
    labels.view(-1)[ignored] = -100
    return dict(labels=labels)


def logits_case(make, *size):
    *rows, classes = (n for n in size if n not in OPTIONS)
    labels = labels_case(make, rows, classes)
    return dict(logits=make.normal(*rows, classes, scale=4)) | labels | OPTIONS.get(size[-1], {})


def head_case(make, *size):
    *rows, hidden, classes = (n for n in size if n not in OPTIONS)
    weight = make.normal(classes, hidden, scale=4 * hidden**-0.5)  # for logits of scale 4
    return (
        dict(x=make.normal(*rows, hidden), weight=weight) | labels_case(make, rows, classes) | OPTIONS.get(size[-1], {})
    )


def ignored_case(make, rows, classes, _):
    return logits_case(make, rows, classes) | labels_case(make, (rows,), classes, ignored=slice(None))


def unknown_case(make, rows, classes, _):
    """Labels of which some are another number that is to be ignored, and some no class at all."""
    labels = make.integers(rows, high=classes)
    labels[1::5], labels[2::5], labels[3::5] = 3, -100, classes
    return dict(logits=make.normal(rows, classes, scale=4), labels=labels, ignore_index=3, reduction="none")


def unknown_head_case(make, rows, hidden, classes, option):
    unknown = unknown_case(make, rows, classes, option)
    return head_case(make, rows, hidden, classes) | {
        name: unknown[name] for name in ("labels", "ignore_index", "reduction")
    }


def padded_case(make, rows, classes, _):
    """The last three classes do not exist, as in a vocabulary padded to a round size."""
    logits = make.normal(rows, classes, scale=4)
    logits[:, -3:] = -torch.inf
    return dict(logits=logits) | labels_case(make, (rows,), classes - 3)


def full(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The case without ignored rows, which cost nothing and would flatter a measurement."""
    return lambda make, *size: build(make, *size) | labels_case(make, size[:1], size[-1], ignored=slice(0, 0))


@operator(
    cases=cases(logits_case, check=[(1, 1), (4, 33), (2, 3, 128), (5, 1000), (2, 32001), (1, 65600), (0, 16)])
    + cases(logits_case, check=[(5, 65, option) for option in OPTIONS])
    + cases(ignored_case, check=[(5, 1000, "ignored")])
    + cases(padded_case, check=[(4, 40, "padded")])
    + cases(unknown_case, check=[(11, 33, "unknown")])
    + cases(full(logits_case), check=[], bench=[(8192, 32000), (8192, 128256), (8192, 151936)]),
    cost=lambda logits: Cost(flops=5 * logits.numel(), backward_flops=4 * logits.numel()),
    check=logits_fit,
    check_values=lambda logits, labels, ignore_index: named_rows_exist(
        "labels", labels, logits.shape[-1], ignore_index
    ),
    consumes=("logits",),  # where `inplace` permits it
)
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """-log softmax(logits)[label] over the last dimension, in float32 also for half precisions; `mean` is over the rows not ignored.

    `softcap` first bounds the logits, softcap · tanh(logits / softcap); `label_smoothing` spreads that share of the target
    evenly over the classes; `z_loss` adds z_loss · logsumexp². An ignored row has no loss and no gradient, whatever its
    logits; one whose label is neither a class nor ignored has a NaN of both. `inplace` permits the gradient to be written
    over the logits, which are then lost; it is taken up only where a gradient is wanted and made in the forward.
    """
    valid = labels != ignore_index
    scores = torch.where(valid[..., None], wide(logits), 0)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    log_p = torch.log_softmax(scores, -1)
    V = logits.shape[-1]
    loss = -(1 - label_smoothing) * log_p.gather(-1, labels.clamp(0, V - 1).long()[..., None]).squeeze(-1)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(scores, -1).square()
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(-1)
    known = torch.where((labels >= 0) & (labels < V), 1.0, torch.nan).to(loss.dtype)
    loss = torch.where(valid, loss * known, 0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()


@operator(
    cases=cases(head_case, check=[(1, 1, 1), (4, 8, 33), (2, 3, 16, 100), (0, 64, 100)])
    + cases(head_case, check=[(5, 8, 65, option) for option in OPTIONS])
    + cases(unknown_head_case, check=[(11, 8, 33, "unknown")])
    + cases(full(head_case), check=[], bench=[(8192, 1024, 151936)]),
    cost=lambda x, weight: Cost(flops=2 * x.numel() * weight.shape[0]),
    check=head_fits,
    check_values=lambda weight, labels, ignore_index: named_rows_exist("labels", labels, weight.shape[0], ignore_index),
)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy(x @ weight.T, labels, ...): the head of a language model and its loss; weight is [vocabulary, hidden]."""
    x, weight = lowered(x, weight)
    return cross_entropy.definition(x @ weight.T, labels, ignore_index, label_smoothing, z_loss, softcap, reduction)


lower_when_traced(linear_cross_entropy)
