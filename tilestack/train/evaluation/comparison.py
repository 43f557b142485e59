"""What a change to a model's weights, such as quantising them, does to its predictions of some texts.

Perplexity says how good a model is, not how far it has moved: errors that help one token and hurt another cancel. So both
models read the same windows, and at each token the distributions of what follows are compared:

    KL divergence      Σ_v p(v) (log p(v) - log q(v))    in nats; p of the model as it was, q as it is
    top-1 agreement    how often both think the same token likeliest

Of the model as it was, its last hidden states are kept and not the model, which is changed in place; so its norm and head
must be those that it had. Logits are in float32 here: bfloat16 has those from 16 on in steps of an eighth, which
adds to the divergence of weights of 8 bits, and makes tokens equally likely that are not.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.data import NO_LABEL
from tilestack.ops.numerics import wide
from tilestack.train.evaluation.evaluate import (
    Estimate,
    EvaluationError,
    TextFigures,
    batches,
    gathered,
    ratio_error,
    text_figures,
)
from tilestack.train.evaluation.log_probs import Rows, Scored

BATCH = 4096  # tokens read at once
CHUNK = 512  # tokens whose logits are there at once


@dataclass(frozen=True)
class Window:
    """A piece of a document that is scored: the document's number, its tokens, its share of the document's bytes."""

    document: int
    scored: Scored
    bytes: float


@dataclass(frozen=True)
class Reference:
    """Texts, and what the model made of them: the hidden states [scored tokens, H] of each batch of windows."""

    windows: list[Window]
    batches: list[tuple[list[int], Rows, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Figures of a model before and after it was changed; `change` is that of bits per byte, whose error is small, as both
    read the same texts."""

    before: TextFigures
    after: TextFigures
    change: Estimate
    kl: Estimate
    agreement: Estimate


def take_windows(documents: Iterable[tuple[Sequence[int], int]], length: int, tokens: int) -> list[Window]:
    """The first windows of documents, given as (ids, bytes), that score about as many tokens."""
    found: list[Window] = []
    for group in gathered(documents, length, length):
        for window in group:
            if tokens <= 0:
                return found
            found.append(Window(*window))
            tokens -= sum(window[1].mask)
    if not found:
        raise EvaluationError("there is no text to evaluate: every document is empty")
    return found


@torch.no_grad()
def remember(model: Any, windows: list[Window], device: torch.device | str) -> Reference:
    """Let a model read windows, for a later comparison with what becomes of it."""
    sequences = [window.scored for window in windows]
    kept = []
    for numbers, rows in batches(model, sequences, BATCH):
        rows = rows.to(device)
        kept.append((numbers, rows, model.hidden(rows.ids)[rows.labels != NO_LABEL].cpu()))
    return Reference(windows, kept)


@torch.no_grad()
def compare(model: Any, reference: Reference, device: torch.device | str) -> Comparison:
    """What a model makes of the texts now, beside what it made of them."""
    figures = torch.zeros(len(reference.windows), 4, dtype=torch.float64)  # of each window, summed over its tokens
    head = wide(model.head_weight)
    log_probs = lambda hidden: torch.log_softmax(softcapped(wide(hidden) @ head.T, model.logit_softcap), -1)
    for numbers, rows, before in reference.batches:
        scored = rows.labels != NO_LABEL
        after = model.hidden(rows.ids)[scored]
        found = token_figures(log_probs, before.to(device), after, rows.labels[scored]).cpu()
        for number, part in zip(numbers, found.split(rows.tokens.tolist()), strict=True):
            figures[number] = part.sum(0)
    return over_documents(reference.windows, figures)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    return ops.softcap(logits, cap) if cap else logits


def token_figures(log_probs: Callable[[Tensor], Tensor], before: Tensor, after: Tensor, labels: Tensor) -> Tensor:
    """[tokens, 4] of hidden states [tokens, H] before and after: nats of each, KL divergence, agreement."""
    parts = []
    for p, q, label in zip(*(each.split(CHUNK) for each in (before, after, labels)), strict=True):
        p, q = log_probs(p), log_probs(q)
        nats = [-each.gather(1, label[:, None])[:, 0] for each in (p, q)]
        divergence = (p.exp() * (p - q)).sum(-1)
        parts.append(torch.stack([*nats, divergence, (p.argmax(-1) == q.argmax(-1)).to(p.dtype)], 1).double())
    return torch.cat(parts)


def over_documents(windows: list[Window], figures: Tensor) -> Comparison:
    """Figures of windows, [windows, 4], over all documents. Errors are of documents, which are independent; or of windows,
    where there is one document."""
    sizes = torch.tensor([[sum(window.scored.mask), window.bytes] for window in windows], dtype=torch.float64)
    numbers = torch.tensor([window.document for window in windows])
    of_windows = torch.cat((figures, sizes), 1)
    of_documents = torch.zeros(int(numbers.max()) + 1, 6, dtype=torch.float64).index_add_(0, numbers, of_windows)
    units = of_documents if len(of_documents) > 1 else of_windows
    text = lambda nats: text_figures(of_documents[:, [nats, 4, 5]].tolist(), of_windows[:, [nats, 4, 5]].tolist())
    ratio = lambda values, by: Estimate(
        float(values.sum() / units[:, by].sum()), ratio_error(torch.stack((values, units[:, by]), 1).tolist())
    )
    change = ratio((units[:, 1] - units[:, 0]) / math.log(2), by=5)
    return Comparison(text(0), text(1), change, ratio(units[:, 2], by=4), ratio(units[:, 3], by=4))
