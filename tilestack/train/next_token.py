"""The loss of a language model: -log p of every next token, from the hidden states that its head reads."""

from typing import Any

from torch import Tensor

from tilestack import data


def next_token_loss(model: Any, batch: data.Batch) -> Tensor:
    """The sum of -log p over the labels of a batch."""
    return loss_of_labels(model, model.hidden(batch.ids, batch.positions, batch.cu_seqlens), batch.labels)


def loss_of_labels(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """The sum of -log p over some labels, [B, T] like hidden [B, T, H], by the model's own head."""
    return model.head_loss(hidden, model.head_weight, labels, model.logit_softcap)
