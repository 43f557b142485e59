"""Log-probabilities of given tokens: what DPO, GRPO and evaluation ask of a model.

Sequences lie one to a row, filled up on the right. Causal attention looks only to the left, so what fills a row changes
nothing before it and no mask is needed:

    ids      p p p a a a . .        prompt, answer, filling
    labels   - - a a a - - -        what follows each id, where it is scored; - is NO_LABEL

The head and the loss are one operator, so float32 logits of the whole vocabulary are never kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.data import NO_LABEL
from tilestack.models.invariant import hidden_of_text, invariant_mode, log_softmax_of, logits_of
from tilestack.nn.autocast import lowered

MULTIPLE = 16  # rows are filled to a multiple of this, so that few different shapes occur


@dataclass(frozen=True)
class Scored:
    """A sequence of token ids of which those marked are scored; the first never is, as nothing precedes it."""

    ids: list[int]
    mask: list[int]

    @classmethod
    def answer(cls, prompt: Sequence[int], answer: Sequence[int]) -> "Scored":
        return cls([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


@dataclass(frozen=True)
class Rows:
    """Sequences one to a row: ids [rows, length], labels [rows, length]."""

    ids: Tensor
    labels: Tensor

    @property
    def tokens(self) -> Tensor:
        """How many tokens of each row are scored, [rows]."""
        return (self.labels != NO_LABEL).sum(-1)

    def without_last(self) -> "Rows":
        """Without the last id of the longest sequence, which nothing follows."""
        return Rows(self.ids[:, :-1], self.labels[:, :-1]) if self.ids.shape[1] > 1 else self

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(self.ids.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


def in_rows(sequences: Sequence[Scored], multiple: int = MULTIPLE) -> Rows:
    """Sequences as rows, filled on the right to the longest of them, rounded up."""
    longest = max(len(sequence.ids) for sequence in sequences)
    length = -(-longest // multiple) * multiple
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    labels = torch.full_like(ids, NO_LABEL)
    for row, sequence in enumerate(sequences):
        tokens = torch.tensor(sequence.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens) - 1] = torch.where(torch.tensor(sequence.mask[1:]) > 0, tokens[1:], NO_LABEL)
    return Rows(ids, labels)


def log_probs(model: Any, rows: Rows, temperature: float = 1.0) -> Tensor:
    """log p(label | the row so far) in float32, [rows, length]; 0 where there is no label.

    At another temperature than 1, of the distribution that sampling at that temperature draws from. A model whose rotation
    depends on the length of a text reads long rows one by one: else the longest would decide for all, and what fills the others.
    """
    by_length = getattr(model, "rotates_by_length", False)
    # Processes that share a model by FSDP2 have to call it equally often, however long their rows are.
    if by_length and (rows.ids.shape[1] > model.rotary.most or hasattr(model, "reshard")):
        each = zip(rows.ids[:, None], rows.labels[:, None], strict=True)
        return torch.cat([log_probs_of_row(model, Rows(*row), temperature) for row in each])
    return log_probs_together(model, rows, temperature)


def log_probs_of_row(model: Any, row: Rows, temperature: float) -> Tensor:
    """Those of one row, read up to its last label and filled up again, [1, length]."""
    scored = (row.labels[0] != NO_LABEL).nonzero()
    end = int(scored[-1]) + 1 if len(scored) else 1
    found = log_probs_together(model, Rows(row.ids[:, :end], row.labels[:, :end]), temperature)
    return torch.nn.functional.pad(found, (0, row.labels.shape[1] - end))


def log_probs_together(model: Any, rows: Rows, temperature: float) -> Tensor:
    hidden = model.hidden(rows.ids)
    softcap = model.logit_softcap
    if temperature != 1.0:
        # The head is linear, and c · tanh(x / c) / T is c/T · tanh((x/T) / (c/T)).
        hidden, softcap = hidden / temperature, softcap / temperature
    if (divided := getattr(model, "head_losses", None)) is not None:
        return -divided(hidden, model.head_weight, rows.labels, softcap)
    hidden, weight, _ = lowered(hidden, model.head_weight, None)
    return -ops.linear_cross_entropy(
        hidden, weight, rows.labels, ignore_index=NO_LABEL, softcap=softcap, reduction="none"
    )


def invariant_log_probs(model: Any, rows: Rows) -> Tensor:
    """`log_probs` at temperature 1 in the batch-invariant mode: with the bits that an engine tells of tokens it served with
    `EngineSettings(batch_invariant=True)`. Texts are read one by one, on a CPU token by token."""
    found = torch.zeros(rows.labels.shape, device=rows.ids.device)
    scored = rows.labels != NO_LABEL
    told = []
    with invariant_mode(rows.ids.device):
        for ids, labels, wanted in zip(rows.ids, rows.labels, scored, strict=True):
            places = wanted.nonzero()[:, 0]
            if not len(places):
                continue
            hidden = hidden_of_text(model, ids[: int(places[-1]) + 1])  # what follows the last changes nothing
            logits = logits_of(model, hidden[places])
            told.append(log_softmax_of(logits).gather(1, labels[places][:, None])[:, 0])
    return found.masked_scatter(scored, torch.cat(told)) if told else found
