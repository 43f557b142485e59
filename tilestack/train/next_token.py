"""The loss of a language model: -log p of every next token, from the hidden states that its head reads."""

from typing import Any

from torch import Tensor

from tilestack import data, ops
from tilestack.nn.autocast import lowered


def next_token_loss(model: Any, batch: data.Batch) -> Tensor:
    """The sum of -log p over the labels of a batch."""
    return loss_of_labels(model, model.hidden(batch.ids, batch.positions, batch.cu_seqlens), batch.labels)


def loss_of_labels(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """The sum of -log p over some labels, [B, T] like hidden [B, T, H]; the logits are never in memory where a kernel spares
    them."""
    if (in_fp8 := getattr(model, "head_loss", None)) is not None:
        return in_fp8(hidden, model.head_weight, labels, model.logit_softcap)
    hidden, weight, _ = lowered(hidden, model.head_weight, None)
    return ops.linear_cross_entropy(hidden, weight, labels, softcap=model.logit_softcap, reduction="sum")
