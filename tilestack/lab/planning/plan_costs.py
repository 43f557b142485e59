"""What a layout costs: bytes on a GPU, bytes it sends in a step, and an estimate of the step's seconds.

Weights, gradients and the optimizer's states are counted, parameter by parameter. Activations are those that our kernels keep,
of a dense layer with RoPE in elements of a token:

    4 hidden + 3 (heads + kv_heads) head_dim + 2 intermediate, and two float32 for each head

and with checkpointing two times `hidden`, and one layer whole. What a GPU sends in a step, for each of M micro-batches of
`tokens` on it, where n ranks share the work and a ring of n sends (n - 1) / n of what it gathers or scatters:

    data       gradients summed once                       2 (n - 1) / n · gradients
    shard      weights gathered twice, gradients scattered      M · (n - 1) / n · (2 weights + gradients in float32)
    tensor     two sums in each layer and two backward, and embedding and head    M · (4 layers + 2) · 2 (n - 1) / n · tokens · hidden
    heads      queries, keys, values and results, and back      M · layers · 2 (n - 1) / n · tokens · (2 heads + 2 kv_heads) · dim
    ring       keys and values twice round, their gradients in float32 once
                                                           M · layers · tokens · 2 kv_heads · dim · (2 (n - 1) + n · 4 bytes)
    expert     rows of the other ranks' experts, there and back, and their gradients; how many, in int32
               M · mixtures · (n - 1) / n · (4 tokens · top_k · hidden + 4 bytes · experts), where experts have as many rows each
    copies     gradients of experts, summed once among the n that have the same    2 (n - 1) / n · their gradients
    pipeline   the residual stream, and its gradient, of each stage of a process    M · 2 tokens · hidden · stages
               and where head and embedding are one, its gradient    vocabulary · hidden

With `expert`, gradients of experts are in `copies` and not in `data`, and `shard` does not divide what is left of them.

A pipeline's process has room for all that it receives in a step (torch.distributed.pipelining), and keeps the activations of as
many micro-batches as its schedule says (parallel/pipeline.py).

The time of a step, where what `ring` sends is hidden behind attention, and what `data`, `copies` and `shard` send behind all
arithmetic, as far as these last:

    arithmetic · (1 + (pipeline - 1) / M, or half of that interleaved) + sent in the open / bandwidth + what is not hidden

The arithmetic is that of `train.flops` at a share of the GPU's peak; with checkpointing a third more.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

from tilestack.models import Decoder, ModelConfig
from tilestack.models.checkpoints import config_of
from tilestack.models.shapes import shapes_alone
from tilestack.parallel.experts import expert_cuts
from tilestack.parallel.mesh import Layout
from tilestack.parallel.pipeline import waiting_share
from tilestack.parallel.stages import layers_of_stages
from tilestack.train import flops
from tilestack.train.execution import DTYPES
from tilestack.train.optimizers import state_bytes
from tilestack.train.recipe import Recipe
from tilestack.train.run.feasible import refuse_beyond_positions
from tilestack.train.run.follow import new_model


@dataclass(frozen=True)
class Cluster:
    """What the estimate assumes of the machines; defaults are those of eight H200 in each."""

    gpus: int
    memory: float = 141e9  # bytes of a GPU
    peak: float = 989e12  # operations a second of a GPU
    efficiency: float = 0.4  # the share of it that a step reaches
    bandwidth: float = 450e9  # bytes a second that a GPU sends to another of its machine
    network: float = 50e9  # and to one of another machine
    node: int = 8  # GPUs of a machine

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value:g}")
        if self.efficiency > 1:
            raise ValueError(f"efficiency is a share of the peak, at most 1, not {self.efficiency:g}")

    def speed(self, ranks: int, apart: int) -> float:
        """Bytes a second in a group of ranks that are so far apart."""
        return self.bandwidth if ranks * apart <= self.node else self.network


@dataclass(frozen=True)
class Sharing(Layout):
    """A layout, and what the recipe says beside it: whether GPUs that differ in data or context divide the model's states, and
    how those that differ in context share a row."""

    shard: bool = False
    method: str = ""  # of context: heads or ring


class States(NamedTuple):
    """Bytes that stay from step to step, and the gradients."""

    weights: int
    gradients: int
    optimizer: int


class Part(NamedTuple):
    """A parameter: the part of the model it belongs to, its bytes, and whether `tensor` divides it, or `expert`."""

    module: str  # embedding, layers, norm or head
    layer: int  # -1 outside of layers
    states: States
    divided: bool
    expert: bool

    def on_each(self, tensor: int, expert: int = 1) -> States:
        ranks = (tensor if self.divided else 1) * (expert if self.expert else 1)
        return States(*(size // ranks for size in self.states))


class Workload:
    """A recipe's model and step, counted once for all layouts."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.data = recipe, recipe.data
        self.model = described_model(recipe)
        self.config: ModelConfig = self.model.config
        refuse_beyond_positions(recipe, self.config.positions)
        self.width = DTYPES[recipe.precision.compute].itemsize  # bytes of an activation
        self.wide = DTYPES[recipe.precision.parameters].itemsize  # and of a weight
        self.operations = flops.per_token(self.model, self.data.sequence)
        self.in_attention = 6 * flops.attention_width(self.config) * self.data.sequence / self.operations
        self.schedule = recipe.parallel.schedule  # of pipeline stages
        self.known_stages: dict[int, list[range]] = {1: [range(self.config.layers)]}

    @cached_property
    def parts(self) -> list[Part]:
        found, of_experts = [], expert_cuts(self.model)
        for name, param in self.model.named_parameters():
            module, _, rest = name.partition(".")
            layer = int(rest.partition(".")[0]) if module == "layers" else -1
            weights = param.numel() * self.wide
            states = States(weights, weights, state_bytes(name, param, self.recipe.optimizer, self.recipe.precision))
            if self.recipe.lora.rank:  # adapters alone learn, which are small
                states = States(weights, 0, 0)
            found.append(Part(module, layer, states, param.ndim > 1 and "router" not in name, name in of_experts))
        return found

    def stages(self, processes: int) -> list[range]:
        """The layers of each stage; stage s is on process s modulo their number."""
        if processes not in self.known_stages:
            self.known_stages[processes] = layers_of_stages(self.model, processes, self.schedule)
        return self.known_stages[processes]

    def most_layers(self, processes: int) -> int:
        """Those of the process that has most."""
        stages = self.stages(processes)
        return max(sum(map(len, stages[process::processes])) for process in range(processes))


def described_model(recipe: Recipe) -> Decoder:
    """The model of a recipe without its weights."""
    with shapes_alone():
        if recipe.model.path:
            return Decoder(config_of(recipe.model.path))
        return new_model(recipe, {"vocab_size": recipe.data.vocabulary})


def stage_states(work: Workload, layout: Sharing) -> tuple[States, States, int]:
    """(the states of the process that has most, before `shard` divides them; of these what belongs to experts that `expert`
    deals out, which `shard` leaves; weights and gradients of the largest part that is gathered at once)."""
    stages, processes = work.stages(layout.pipeline), layout.pipeline
    process_of = {layer: number % processes for number, stage in enumerate(stages) for layer in stage}
    sums, last = [[0, 0, 0] for _ in range(processes)], processes - 1
    units: dict[tuple[str, int], int] = {}
    dealt = States(0, 0, 0)  # mixtures have no stages
    for part in work.parts:
        states = part.on_each(layout.tensor, layout.expert)
        places = {process_of.get(part.layer, 0 if part.module == "embedding" else last)}
        if part.module == "embedding" and work.config.tied:
            places.add(last)
        for place in places:
            sums[place] = [before + size for before, size in zip(sums[place], states, strict=True)]
        if part.expert and layout.expert > 1:
            dealt = States(*(before + size for before, size in zip(dealt, states, strict=True)))
        else:
            units[part[:2]] = units.get(part[:2], 0) + states.weights + states.gradients
    return States(*max(sums, key=sum)), dealt, max(units.values())


def received_bytes(work: Workload, layout: Sharing, tokens: int) -> int:
    """What the pipeline stages of the process that gets most receive of a micro-batch: streams, and gradients of streams."""
    stages, last = work.stages(layout.pipeline), len(work.stages(layout.pipeline)) - 1
    messages = [(stage > 0) + (stage < last) for stage in range(len(stages))]
    most = max(sum(messages[process :: layout.pipeline]) for process in range(layout.pipeline))
    return most * tokens * work.config.hidden * work.wide


def layer_bytes(config: ModelConfig, tensor: int, width: int) -> int:
    """What a layer keeps of a token for the backward, on each of so many GPUs that divide it."""
    if config.kv_rank:
        split = 2 * config.head_dim + config.nope_dim + 2 * config.value_dim
        attention = config.heads * (split + config.head_dim) + 2 * (config.q_rank + config.kv_rank + config.rope_dim)
    else:
        attention = 3 * (config.heads + config.kv_heads) * config.head_dim
    feed_forward = 2 * config.intermediate
    whole = 4 * config.hidden
    if config.experts:
        feed_forward = 2 * (config.top_k * config.expert_intermediate + config.shared_intermediate)
        whole += 2 * config.top_k * config.hidden  # rows as experts get them, and as they leave
    return width * (whole + (attention + feed_forward) // tensor) + 8 * config.heads // tensor


def sent_bytes(
    work: Workload, layout: Sharing, states: States, dealt: States, tokens: int, micro_batches: int
) -> dict[str, int]:
    """Bytes that a GPU sends in a step, by kind; see the head of this file. Of its states some are of `dealt` experts."""
    config, share = work.config, lambda ranks: (ranks - 1) / ranks
    layers = work.most_layers(layout.pipeline)
    passed = micro_batches * layers * tokens * work.width  # of each element of a token
    queries = config.heads // layout.tensor
    keys = queries if config.kv_rank else config.kv_heads // layout.tensor
    dims = config.head_dim + (config.value_dim if config.kv_rank else config.head_dim)
    found: dict[str, float] = {}
    if layout.shard:
        summed = (states.gradients - dealt.gradients) // work.wide * 4
        found["shard"] = micro_batches * share(layout.replicas) * (2 * (states.weights - dealt.weights) + summed)
    elif layout.replicas > 1:
        found["data"] = 2 * share(layout.replicas) * (states.gradients - dealt.gradients)
    if layout.expert > 1:
        rows = 4 * tokens * config.top_k * config.hidden * work.width + 4 * config.experts
        mixtures = sum(config.sparse(layer) for layer in range(config.layers))
        found["expert"] = micro_batches * mixtures * share(layout.expert) * rows
        if layout.copies > 1:
            found["copies"] = 2 * share(layout.copies) * dealt.gradients
    if layout.tensor > 1:
        found["tensor"] = 2 * share(layout.tensor) * (passed * 4 + passed // layers * 2) * config.hidden
    if layout.method == "heads":
        repeated = keys * layout.context // math.gcd(keys, layout.context)
        found["heads"] = 2 * share(layout.context) * passed * (queries + repeated) * dims
    if layout.method == "ring":
        found["ring"] = passed * keys * dims * (2 * (layout.context - 1) + layout.context * 4 / work.width)
    if layout.pipeline > 1:
        each = len(work.stages(layout.pipeline)) // layout.pipeline
        found["pipeline"] = micro_batches * 2 * tokens * config.hidden * work.wide * each
        if config.tied:
            divided = layout.tensor * (layout.replicas if layout.shard else 1)
            found["pipeline"] += config.vocabulary * config.hidden * work.wide // divided
    return {kind: round(size) for kind, size in found.items()}


def step_seconds(
    work: Workload, cluster: Cluster, layout: Sharing, micro_batches: int, checkpointing: bool, sent: dict[str, int]
) -> dict[str, float]:
    """The estimated seconds of a step, by what they go to."""
    tokens = work.data.batch * work.data.sequence * micro_batches * layout.data
    operations = work.operations * tokens * (4 / 3 if checkpointing else 1)
    arithmetic = operations / cluster.gpus / (cluster.peak * cluster.efficiency)
    times = {kind: size / group_speed(cluster, layout, kind) for kind, size in sent.items()}
    ring = max(0.0, times.pop("ring", 0.0) - arithmetic * work.in_attention)
    gradients = max(0.0, sum(times.pop(kind, 0.0) for kind in ("data", "copies", "shard")) - arithmetic)
    bubble = arithmetic * waiting_share(work.schedule, layout.pipeline, micro_batches)
    return {"arithmetic": arithmetic, "bubble": bubble, **times, "not hidden": ring + gradients}


def group_speed(cluster: Cluster, layout: Sharing, kind: str) -> float:
    """Bytes a second of a kind of communication. Neighbours are, from the nearest: tensor, context, data, pipeline; those that
    share experts are the nearest of data and context."""
    ranks, apart = {
        "tensor": (layout.tensor, 1),
        "heads": (layout.context, layout.tensor),
        "ring": (layout.context, layout.tensor),
        "data": (layout.replicas, layout.tensor),
        "shard": (layout.replicas, layout.tensor),
        "expert": (layout.expert, layout.tensor),
        "copies": (layout.copies, layout.tensor * layout.expert),
        "pipeline": (layout.pipeline, layout.tensor * layout.replicas),
    }[kind]
    return cluster.speed(ranks, apart)
