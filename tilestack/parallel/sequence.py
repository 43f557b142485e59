"""Sequence (context) parallelism: each rank of a group has a part of every row's tokens, and meets the others in attention.

    batch [B, T] ──cut──► rank 0 [B, T / N] ── hidden ── loss ─┐
                  └─────► rank 1 [B, T / N] ── hidden ── loss ─┴─► sums over the group: loss, count, gradients of parameters

Everything but attention looks at one token at a time, so the model runs as it is: positions say where a token stands, labels
go with their tokens, and a `Context` does the rest. The loss of a rank is a sum over its own labels. Gradients of parameters
have to be summed over the group, as over ranks that have other rows.

    heads   an all-to-all before and after attention; any kind of attention; at most as many ranks as heads (heads.py)
    ring    keys and values go round; any number of ranks; no sliding windows (ring.py)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tilestack.data import NO_LABEL, Batch
from tilestack.models.config import ModelConfig
from tilestack.models.context import Context
from tilestack.parallel.heads import HeadsContext, heads_places, refuse_heads
from tilestack.parallel.ring import RingContext, refuse_window, ring_places


@dataclass(frozen=True)
class Method:
    """One way to share a sequence."""

    places: Callable[..., Tensor]  # (tokens of a row, rank, ranks, device): which of them the rank has
    context: Callable[[dist.ProcessGroup, Tensor, Tensor | None], Context]


METHODS = {"heads": Method(heads_places, HeadsContext), "ring": Method(ring_places, RingContext)}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"there is no way {name!r} to share a sequence; choose from {', '.join(METHODS)}")
    return METHODS[name]


def cut_batch(batch: Batch, name: str, rank: int, ranks: int) -> Batch:
    """What a rank has of a batch by some method. Documents stay those of whole rows, which attention sees; the count of valid
    labels is the rank's own, so that counts add up over the group."""
    places = method_named(name).places(batch.ids.shape[1], rank, ranks, batch.ids.device)
    ids, labels, positions = (x.index_select(1, places) for x in (batch.ids, batch.labels, batch.positions))
    return replace(batch, ids=ids, labels=labels, positions=positions, valid=(labels != NO_LABEL).sum())


class SequenceParallel:
    """A model for training steps whose rows are shared by a group; everything but its forward is the model's own.

    What it is given is what `cut_batch` makes, ids and positions of this rank and documents of whole rows."""

    def __init__(self, model: Any, group: dist.ProcessGroup, name: str):
        self.model, self.group, self.method = model, group, method_named(name)

    def hidden(self, ids: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The hidden states of this rank's tokens, [B, T / N, H]."""
        rank, ranks = self.group.rank(), self.group.size()
        places = self.method.places(ids.shape[1] * ranks, rank, ranks, ids.device)
        return self.model.hidden(ids, positions, context=self.method.context(self.group, places, cu_seqlens))

    def __call__(self, ids: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.model.logits(self.hidden(ids, positions, cu_seqlens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def refuse_sharing(config: ModelConfig, row: int, name: str, ranks: int, tensor: int = 1) -> None:
    """Refuse, before the first step, what a method cannot share: rows of so many tokens of a model among so many ranks, where
    `tensor` others divide its heads."""
    method_named(name).places(row, 0, ranks)
    windows = [
        window for layer in range(config.layers) if (window := config.window(layer)) is not None and window < row
    ]
    if name == "heads":
        refuse_heads(config.heads // tensor, ranks)
    elif windows:
        refuse_window(windows[0])
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "longrope" and row > scaling["original_max_position_embeddings"]:
        raise ValueError(
            f"the model's RoPE (longrope) depends on the longest document of a batch, which no rank knows alone; take rows of at "
            f"most {scaling['original_max_position_embeddings']} tokens, not {row}"
        )
