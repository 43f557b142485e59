"""Pipeline stages: each process of a group has some layers of a decoder, and hands the residual stream on to the next.

    ids ─► embedding ─ layers 0…7 ─┐ stage 0
                                   └─► layers 8…15 ─┐ stage 1
                                                    └─► layers 16…21 ─ norm ─ head ─ loss   stage 2

Under the schedule `interleaved` a process has two stages, so that the stream goes round the processes twice:

    processes    0          1          0          1
                 stage 0 ─► stage 1 ─► stage 2 ─► stage 3

Where head and embedding share their weight, the first process and the last have it each, and the sum of both gradients, so that
both take the same step. Training goes by a schedule (pipeline.py). `hidden`, `logits` and `head_loss` are for evaluation: all
processes call them together, and what comes of them is known to all.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilestack.models.cache import KVCache
from tilestack.models.config import ModelConfig
from tilestack.models.context import Context, Documents
from tilestack.models.decoder import Decoder, places_of, run_layers
from tilestack.parallel.tensor import TensorDecoder

STAGES_EACH = {"1f1b": 1, "gpipe": 1, "interleaved": 2}  # of a process, by schedule


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


def layers_of_stages(model: Decoder, processes: int, schedule: str = "1f1b") -> list[range]:
    """The layers of each stage, by how many weights it multiplies with; an embedding weighs as much as a head. Stage s is on
    process s modulo their number."""
    size = lambda module: sum(parameter.numel() for parameter in module.parameters())
    head = model.config.vocabulary * model.config.hidden
    return deal_layers([size(layer) for layer in model.layers], head, head, processes * STAGES_EACH[schedule])


def refuse_stages(config: ModelConfig, processes: int, schedule: str, micro_batches: int) -> None:
    """Refuse a model that so many processes cannot have one after another, or a step of too few micro-batches."""
    asked = f'parallel.pipeline = {processes} by parallel.schedule = "{schedule}"'
    if config.experts:
        raise ValueError(
            f"parallel.pipeline = {processes} takes dense models, and this {config.family} model is a mixture of experts "
            "(num_experts): the loss that balances them is not carried between stages; set parallel.pipeline = 1, and "
            "parallel.expert or parallel.shard to divide the model"
        )
    if (stages := processes * STAGES_EACH[schedule]) > config.layers:
        raise ValueError(
            f"{asked} needs {stages} layers or more, and the model has {config.layers} ({config.spelt('layers')})"
        )
    if schedule == "1f1b" and micro_batches < processes:
        raise ValueError(
            f"{asked} needs as many micro-batches in a step, and data.accumulate is {micro_batches}; set it to {processes} or more"
        )
    if schedule == "interleaved" and micro_batches % max(1, micro_batches // processes):
        raise ValueError(
            f"{asked} takes micro-batches {processes} at a time, and data.accumulate is {micro_batches}; set it to a multiple "
            f"of {processes}"
        )


class StageDecoder(Decoder):
    """A decoder of which this process has some stages, under the names they have in the whole one."""

    stages: list[range]  # the layers of all
    stage_group: dist.ProcessGroup

    @property
    def own_stages(self) -> range:
        return range(self.stage_group.rank(), len(self.stages), self.stage_group.size())

    @property
    def last_stage(self) -> int:
        return len(self.stages) - 1

    def run_stage(self, stage: int, x: Tensor, positions: Tensor | None, context: Context) -> Tensor:
        """ids [B, T] or the residual stream [B, T, H] in; the stream, or at the end hidden states, out."""
        places = places_of(self.rotary, x.shape[:2], positions, context)
        x = x if stage else self.embedded(x)
        layers = [self.get_submodule(f"layers.{number}") for number in self.stages[stage]]
        x, residual = run_layers(layers, x, None, places, context, self.checkpointing)
        assert residual is not None
        return self.normed(x, residual) if stage == self.last_stage else x.to(residual.dtype) + residual

    def stage_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of -log p over labels, in the last stage."""
        return super().head_loss(hidden, self.head_weight, labels, self.logit_softcap)

    @torch.no_grad()
    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """As `Decoder.hidden`, on the last process. To the others hidden states are no use, and what they get has their shape
        and no memory."""
        if ids.ndim == 1:
            return self.hidden(ids[None], positions, cu_seqlens, context)[0]
        context = Documents(cu_seqlens) if context is None else context
        processes, x = self.stage_group.size(), ids
        for stage in self.own_stages:
            if stage:
                like = next(self.parameters())
                x = torch.empty(*ids.shape, self.config.hidden, dtype=like.dtype, device=like.device)
                dist.recv(x, group_src=(stage - 1) % processes, group=self.stage_group)
            x = self.run_stage(stage, x, positions, context)
            if stage == self.last_stage:
                return x
            dist.send(x, group_dst=(stage + 1) % processes, group=self.stage_group)
        if isinstance(context, KVCache):
            context.length += ids.shape[1]  # which the last layer does, where it is
        return x.to("meta")

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, on all processes and at least in float32."""
        find = super().logits
        return self._from_last(lambda: find(hidden), *hidden.shape[:-1], self.config.vocabulary)

    @torch.no_grad()
    def head_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:
        """As `Decoder.head_loss`, on all processes."""
        return self._from_last(lambda: self.stage_loss(hidden, labels))

    @property
    def head_weight(self) -> Tensor:
        """Without memory where it is not here, as hidden states are."""
        if self.last_stage in self.own_stages:
            return super().head_weight
        return torch.empty(self.config.vocabulary, self.config.hidden, device="meta")

    def _from_last(self, find: Callable[[], Tensor], *shape: int) -> Tensor:
        """What the last stage finds, of this shape."""
        like = next(self.parameters())
        wide = torch.promote_types(like.dtype, torch.float32)
        last = self.stage_group.size() - 1
        if self.stage_group.rank() == last:
            found = find().to(wide).contiguous()
        else:
            found = torch.empty(shape, dtype=wide, device=like.device)
        dist.broadcast(found, group_src=last, group=self.stage_group)
        return found


class TensorStageDecoder(StageDecoder, TensorDecoder):
    """Stages each of which several processes share (tensor.py)."""


def split_stages(decoder: Decoder, group: dist.ProcessGroup, schedule: str) -> None:
    """Turn a decoder in place into this process's stages of it; the rest may go from memory."""
    stages = layers_of_stages(decoder, group.size(), schedule)
    decoder.__class__ = TensorStageDecoder if isinstance(decoder, TensorDecoder) else StageDecoder
    assert isinstance(decoder, StageDecoder)
    decoder.stages, decoder.stage_group = stages, group
    kept = {str(number): decoder.layers[number] for stage in decoder.own_stages for number in stages[stage]}
    decoder.layers = nn.ModuleDict(kept)  # type: ignore[assignment]
    first, last = group.rank() == 0, group.rank() == group.size() - 1
    parts = {"embedding": first or (last and decoder.config.tied), "norm": last, "head": last}
    for name, stays in parts.items():
        if not stays:
            setattr(decoder, name, None)


def owner_of(name: str, stages: Sequence[range], processes: int) -> int:
    """The process that has a parameter; the first of two."""
    module, _, rest = name.partition(".")
    if module == "layers":
        layer = int(rest.partition(".")[0])
        return next(number for number, stage in enumerate(stages) if layer in stage) % processes
    return 0 if module == "embedding" else processes - 1
