"""Steps of a pipeline: micro-batches follow one another through the stages (stages.py), so that these work at the same time.

Of P processes and M micro-batches, a process waits for (P - 1) / (M + P - 1) of the step under the first two schedules, which
differ in what is kept:

    1f1b, P = 3, M = 4    stage 0   0 1 2 . . a 3 b . c . d      a is the backward of micro-batch 0, b that of 1, …
                          stage 1   . 0 1 . a 2 b 3 c . d .      stage s has activations of at most P - s micro-batches
                          stage 2   . . 0 a 1 b 2 c 3 d . .
    gpipe                 all forwards, then all backwards; activations of all M micro-batches
    interleaved           1f1b of twice as many stages, two on each process: half of the wait, more activations, twice as many
                          messages

The schedules are torch.distributed.pipelining's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilestack.data import Batch
from tilestack.models.context import Documents
from tilestack.parallel.stages import STAGES_EACH, StageDecoder


def waiting_share(schedule: str, processes: int, micro_batches: int) -> float:
    """How long a process waits in a step, as a share of how long it works, where all stages take equally long."""
    return (processes - 1) / micro_batches / STAGES_EACH[schedule]


def micro_batches_kept(schedule: str, processes: int, micro_batches: int) -> float:
    """The activations that the process with most of them has at a time, in those of one micro-batch in all of its layers."""
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(processes, micro_batches)
    each = STAGES_EACH[schedule]
    # So many pass a stage before they go on to the process's next one.
    together = micro_batches // max(1, micro_batches // processes)
    return min(each * micro_batches, (each - 1) * together + 2 * (processes - 1) + 1) / each


class Stage(nn.Module):
    """One stage as a schedule calls it."""

    def __init__(self, model: StageDecoder, number: int, autocast: Callable[[], AbstractContextManager[Any]]):
        super().__init__()
        self.model, self.number, self.autocast = model, number, autocast

    def forward(self, x: Tensor, *, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`cu_seqlens` are [1, documents + 1], a row of those of all micro-batches."""
        with self.autocast():
            return self.model.run_stage(self.number, x, positions, Documents(cu_seqlens[0]))


class Pipeline:
    """One process's stages of a decoder, and the steps it takes together with the others."""

    def __init__(
        self,
        model: StageDecoder,
        *,
        rows: int,
        tokens: int,
        micro_batches: int,
        schedule: str,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """Micro-batches have so many rows of so many tokens; forwards run inside of `autocast`."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        self.group, self.micro_batches, self.shape = model.stage_group, micro_batches, (rows, tokens)
        weight = next(model.parameters())
        self.like = torch.empty(0, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        # With examples of what goes in and out, stages need not ask each other for shapes.
        stream = torch.empty(rows, tokens, model.config.hidden, dtype=weight.dtype, device="meta", requires_grad=True)
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        stages = [
            PipelineStage(
                Stage(model, number, autocast), number, len(model.stages), weight.device,
                input_args=(stream if number else ids,), output_args=(stream,), group=self.group,
            )
            for number in model.own_stages
        ]  # fmt: skip

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            with autocast():
                return model.stage_loss(hidden, labels)

        how: dict[str, Any] = dict(n_microbatches=micro_batches, loss_fn=loss, scale_grads=False)
        self.schedule: Any
        if STAGES_EACH[schedule] == 1:
            self.schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](stages[0], **how)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, **how)  # type: ignore[arg-type]

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all micro-batches of a step, which are given to all processes alike; the loss of each, a sum
        over its labels, on all processes. Gradients of the sum of them are added to those of the parameters."""
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
        try:
            self.schedule.step(
                *inputs, target=labels, losses=losses, return_outputs=False, positions=positions, cu_seqlens=documents
            )
        except RuntimeError as problem:  # what a forward raises comes wrapped in the shapes of its arguments
            raise problem.__cause__ or problem from None
        found = torch.stack(losses).detach().to(self.like) if last else self.like.new_zeros(self.micro_batches)
        dist.broadcast(found, group_src=self.group.size() - 1, group=self.group)
        return found
