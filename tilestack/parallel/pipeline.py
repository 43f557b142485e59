"""Pipeline stages: each rank of a group has some layers of a decoder, and hands the residual stream on to the next.

    ids ─► embedding ─ layers 0…7 ─┐ stage 0
                                   └─► layers 8…15 ─┐ stage 1
                                                    └─► layers 16…21 ─ norm ─ head ─ loss   stage 2

Micro-batches follow one another, so that stages work at the same time. Of P stages and M micro-batches, a stage waits for
(P - 1) / (M + P - 1) of the step whichever of the two schedules runs; they differ in what is kept:

    1f1b, P = 3, M = 4    stage 0   0 1 2 . . a 3 b . c . d      a is the backward of micro-batch 0, b that of 1, …
                          stage 1   . 0 1 . a 2 b 3 c . d .      stage s has activations of at most P - s micro-batches
                          stage 2   . . 0 a 1 b 2 c 3 d . .
    gpipe                 all forwards, then all backwards; activations of all M micro-batches

The schedules are torch.distributed.pipelining's. Where head and embedding share their weight, the first and the last stage
have it each, and the sum of their gradients, so that both take the same step.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tilestack.data import Batch
from tilestack.models import Decoder
from tilestack.models.context import Documents
from tilestack.models.decoder import places_of, run_layers

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LossOfLabels = Callable[[Any, Tensor, Tensor], Tensor]  # (model, hidden [B, T, H], labels [B, T]): a sum


def deal_layers(works: Sequence[int], before: int, after: int, stages: int) -> list[range]:
    """Layers for each stage so that the largest stage is as small as can be. `works` are those of layers, `before` and `after`
    what the first stage and the last have beside them: embedding and head."""
    if not 1 <= stages <= len(works):
        raise ValueError(f"{len(works)} layers cannot be dealt to {stages} stages: take 1 to {len(works)}")
    whole = len(works)
    sums = [0, *itertools.accumulate(works)]
    size = lambda start, end: sums[end] - sums[start] + before * (start == 0) + after * (end == whole)

    @functools.cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        """(the largest stage, where stages end) of the layers from `start` on, in the stages that are left."""
        if left == 1:
            return size(start, whole), (whole,)
        rests = {end: best(end, left - 1) for end in range(start + 1, whole - left + 2)}
        return min((max(size(start, end), largest), (end, *ends)) for end, (largest, ends) in rests.items())

    return list(itertools.starmap(range, itertools.pairwise((0, *best(0, stages)[1]))))


def layers_of_stages(model: Decoder, stages: int) -> list[range]:
    """The layers of each stage, by how many weights it multiplies with; an embedding weighs as much as a head."""
    if model.config.experts:
        raise ValueError(
            "pipeline stages take dense models: the loss that balances experts is not carried between stages"
        )
    size = lambda module: sum(parameter.numel() for parameter in module.parameters())
    head = model.config.vocabulary * model.config.hidden
    return deal_layers([size(layer) for layer in model.layers], head, head, stages)


def keep_stage(model: Decoder, layers: range) -> None:
    """Leave of a decoder what a stage has, under the names it had; the rest may go from memory."""
    first, last = layers.start == 0, layers.stop == model.config.layers
    kept = {str(number): model.layers[number] for number in layers}
    model.layers = nn.ModuleDict(kept)  # type: ignore[assignment]
    parts = {"embedding": first or (last and model.config.tied), "norm": last, "head": last}
    for name, stays in parts.items():
        if not stays:
            setattr(model, name, None)


class Stage(nn.Module):
    """The forward of a stage: ids or the residual stream in; the residual stream, or at the end hidden states, out."""

    def __init__(self, model: Decoder, first: bool):
        super().__init__()
        self.model, self.first, self.last = model, first, model.norm is not None

    def forward(self, x: Tensor, *, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`cu_seqlens` are [1, documents + 1], a row of those of all micro-batches."""
        context = Documents(cu_seqlens[0])
        places = places_of(self.model.rotary, x.shape[:2], positions, context)
        x = self.model.embedded(x) if self.first else x
        layers = self.model.layers.values()  # type: ignore[operator]
        x, residual = run_layers(layers, x, None, places, context, self.model.checkpointing)
        assert residual is not None
        return self.model.normed(x, residual) if self.last else x.to(residual.dtype) + residual


class Pipeline:
    """One rank's stage of a decoder, and the steps it takes together with the others."""

    def __init__(
        self,
        model: Decoder,
        group: dist.ProcessGroup,
        loss: LossOfLabels,
        *,
        rows: int,
        tokens: int,
        micro_batches: int,
        schedule: str = "1f1b",
    ):
        """`model` is whole, the same on all ranks, where its step will run; of it, this rank's stage is left (`keep_stage`).
        Micro-batches have so many rows of so many tokens."""
        if schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
        if micro_batches < group.size() and schedule == "1f1b":
            raise ValueError(
                f"{group.size()} stages need at least as many micro-batches in a step, and there are {micro_batches}: "
                f"set data.accumulate = {group.size()} or more"
            )
        self.model, self.group, self.micro_batches, self.shape = model, group, micro_batches, (rows, tokens)
        weight = model.embedding.weight
        self.no_loss = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        stages, stage = group.size(), group.rank()
        keep_stage(model, layers_of_stages(model, stages)[stage])
        self.tied: dist.ProcessGroup | None = None  # of the stages that have the weight of embedding and head
        if model.config.tied and stages > 1 and model.embedding is not None:
            ends = [dist.get_global_rank(group, place) for place in (0, stages - 1)]
            self.tied = dist.new_group(ends, use_local_synchronization=True)
        stream = torch.empty(rows, tokens, model.config.hidden, dtype=weight.dtype, device="meta", requires_grad=True)
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        made = PipelineStage(
            Stage(model, first=stage == 0), stage, stages, weight.device,
            input_args=(stream if stage else ids,), output_args=(stream,), group=group,
        )  # fmt: skip
        loss_of = lambda hidden, labels: loss(model, hidden, labels)
        self.schedule = SCHEDULES[schedule](made, micro_batches, loss_of, scale_grads=False)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all micro-batches of a step, which are given to all ranks alike; the sum of their losses, on
        all ranks. The stage's parameters, which have no gradients before, then have those of the sum."""
        if wrong := [tuple(batch.ids.shape) for batch in batches if tuple(batch.ids.shape) != self.shape]:
            raise ValueError(f"micro-batches of this pipeline are {self.shape}, and one is {wrong[0]}")
        if len(batches) != self.micro_batches:
            raise ValueError(f"a step of this pipeline has {self.micro_batches} micro-batches, not {len(batches)}")
        first, last = self.group.rank() == 0, self.group.rank() == self.group.size() - 1
        inputs = [torch.cat([batch.ids for batch in batches])] if first else []
        labels = torch.cat([batch.labels for batch in batches]) if last else None
        positions = torch.cat([batch.positions for batch in batches])
        documents = torch.stack([batch.cu_seqlens for batch in batches])
        losses: list[Tensor] = []
        self.schedule.step(
            *inputs, target=labels, losses=losses, return_outputs=False, positions=positions, cu_seqlens=documents
        )
        total = torch.stack(losses).detach().sum() if last else self.no_loss.clone()
        dist.all_reduce(total, group=self.group)
        if self.tied is not None:
            dist.all_reduce(self.model.embedding.weight.grad, group=self.tied)
        return total
