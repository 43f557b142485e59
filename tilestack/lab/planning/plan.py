"""What a model would need on N GPUs, in every layout that they can have, so that one can be chosen before any is paid for.

    for tensor, pipeline, context, data with a product of N, and expert:  layout ─► bytes, communication, estimated seconds (plan_costs.py)

A step has as many rows in every layout, so that steps are comparable: data.batch · data.accumulate · N, what data parallelism
alone would give it. The time is an estimate to compare layouts by, not a promise.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilestack.lab.planning.plan_costs import (
    Cluster,
    Sharing,
    Workload,
    layer_bytes,
    received_bytes,
    sent_bytes,
    stage_states,
    step_seconds,
)
from tilestack.models import ModelConfig
from tilestack.parallel.pipeline import micro_batches_kept
from tilestack.parallel.sequence import METHODS, refuse_sharing
from tilestack.parallel.stages import refuse_stages
from tilestack.parallel.tensor import CannotSplit, refuse_split
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError


@dataclass(frozen=True)
class Plan:
    """A layout and what it takes, on the GPU that has most. Bytes, and seconds of a step."""

    layout: Sharing
    weights: int
    gradients: int
    optimizer: int
    buffers: int  # with shard, the weights and gradients of two layers, whole; else, gradients on their way to others; and what
    # pipeline stages receive
    activations: int
    activations_checkpointed: int
    checkpointing: bool  # whether it needs to be, to fit
    fits: bool
    micro_batches: int
    communication: dict[str, int]  # by kind, sent in a step
    seconds: dict[str, float]  # of a step, by what they go to

    @property
    def memory(self) -> int:
        activations = self.activations_checkpointed if self.checkpointing else self.activations
        return self.weights + self.gradients + self.optimizer + self.buffers + activations

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory, "step": self.step}


def plans(work: Workload, cluster: Cluster) -> list[Plan]:
    """Every layout on a cluster: those that fit first, of those the fastest, and of equally fast ones those that send least."""
    found = [plan_of(work, cluster, layout) for layout in layouts(work, cluster.gpus)]
    return sorted(found, key=lambda plan: (not plan.fits, plan.step, sum(plan.communication.values())))


def layouts(work: Workload, gpus: int) -> Iterator[Sharing]:
    """The layouts that a model can have on so many GPUs."""
    config, data = work.config, work.data
    numbers = [number for number in range(1, gpus + 1) if gpus % number == 0]
    for tensor in filter(lambda ranks: can_split(config, ranks), numbers):
        for pipeline in filter(lambda ranks: gpus % (tensor * ranks) == 0, numbers):
            for context in filter(lambda ranks: gpus % (tensor * pipeline * ranks) == 0, numbers):
                replicas = gpus // (tensor * pipeline * context)
                if not can_stage(config, pipeline, work.schedule, data.accumulate * gpus // replicas):
                    continue
                for method in sharing_methods(config, data.sequence, context, tensor):
                    for expert in filter(lambda ranks: can_deal(config, ranks, replicas * context), numbers):
                        for shard in (False, True)[: 2 if replicas * context > 1 else 1]:
                            layout = Sharing(pipeline, replicas, context, tensor, expert, shard, method)
                            if recipe_takes(work.recipe, layout):
                                yield layout


def can_split(config: ModelConfig, tensor: int) -> bool:
    """Whether so many GPUs can divide every layer."""
    try:
        refuse_split(config, tensor)
    except CannotSplit:
        return tensor == 1
    return True


def can_deal(config: ModelConfig, expert: int, replicas: int) -> bool:
    """Whether so many GPUs can share the experts of a mixture."""
    return expert == 1 or (config.experts > 0 and config.experts % expert == 0 and replicas % expert == 0)


def can_stage(config: ModelConfig, pipeline: int, schedule: str, micro_batches: int) -> bool:
    """Whether so many GPUs can have the layers one after another."""
    try:
        refuse_stages(config, pipeline, schedule, micro_batches)
    except ValueError:
        return pipeline == 1
    return True


def recipe_takes(recipe: Recipe, layout: Sharing) -> bool:
    """Whether a recipe may ask for a layout."""
    sides = {side: getattr(layout, side) for side in ("tensor", "shard", "context", "pipeline", "expert")}
    try:
        replace(recipe, parallel=replace(recipe.parallel, **sides))
    except RecipeError:
        return False
    return True


def sharing_methods(config: ModelConfig, row: int, context: int, tensor: int) -> list[str]:
    """The ways in which so many ranks can share rows; [""] where one rank has all of them."""
    if context == 1:
        return [""]
    able = []
    for method in METHODS:
        try:
            refuse_sharing(config, row, method, context, tensor)
        except ValueError:
            continue
        able.append(method)
    return able


def plan_of(work: Workload, cluster: Cluster, layout: Sharing) -> Plan:
    micro_batches = work.data.accumulate * cluster.gpus // layout.data
    tokens = work.data.batch * work.data.sequence // layout.context
    states, dealt, unit = stage_states(work, layout)
    among = layout.replicas if layout.shard else 1
    weights, gradients, optimizer = (
        -(-(size - apart) // among) + apart for size, apart in zip(states, dealt, strict=True)
    )
    buffers = 2 * unit if layout.shard else gradients - dealt.gradients if layout.replicas > 1 else 0
    buffers += dealt.gradients if layout.copies > 1 else 0
    buffers += micro_batches * received_bytes(work, layout, tokens)
    waiting = micro_batches_kept(work.schedule, layout.pipeline, micro_batches) if layout.pipeline > 1 else 1
    layers = work.most_layers(layout.pipeline)
    stream = work.config.hidden * work.width * tokens
    layer = layer_bytes(work.config, layout.tensor, work.width) * tokens
    ends = 4 * stream  # embedding, last norm, what the head reads and its gradient
    activations = round(waiting * (layers * layer + ends))
    checkpointed = round(waiting * (layers * 2 * stream + ends)) + layer
    kept = weights + gradients + optimizer + buffers
    checkpointing = kept + activations > cluster.memory
    fits = kept + (checkpointed if checkpointing else activations) <= cluster.memory
    sent = sent_bytes(work, layout, states, dealt, tokens, micro_batches)
    seconds = step_seconds(work, cluster, layout, micro_batches, checkpointing, sent)
    return Plan(
        layout, weights, gradients, optimizer, buffers, activations, checkpointed, checkpointing, fits, micro_batches,
        sent, seconds,
    )  # fmt: skip
