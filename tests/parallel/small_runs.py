"""A few steps of a tiny decoder in float64, on any layout: what a process of a group computes, and what one alone does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import config_of

from tilestack import models, optim
from tilestack.data.packing import NO_LABEL, collate
from tilestack.nn.lora import add_lora
from tilestack.nn.router import Router
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.placement import Placement
from tilestack.parallel.sequence import SequenceParallel, cut_batch
from tilestack.train import Loss, Recipe
from tilestack.train.balancing import Balancing
from tilestack.train.next_token import next_token_loss
from tilestack.train.optimizers import AveragedWeights, hidden_and_others, set_rates
from tilestack.train.pipeline_step import PipelineStep
from tilestack.train.settings import read
from tilestack.train.step import Step
from tilestack.train.whole_state import WholeState

ROWS, TOKENS, STEPS = 2, 12, 3
CPU = torch.device("cpu")
BALANCE = {"bias_rate": 0.0, "auxiliary_loss": 0.02}


def decoder(
    family: str, layers: int = 0, seed: int = 0, lora: int = 0, router_bias: bool = False, **settings
) -> models.Decoder:
    """A model of a family, of so many layers where it is said, with adapters of a rank, with biases of routers."""
    torch.manual_seed(seed)
    settings |= {"num_hidden_layers": layers} if layers else {}
    model = models.Decoder(models.ModelConfig.from_hf(config_of(family) | settings)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif parameter.ndim > 1:
                parameter.mul_(4)  # so that words and layers differ in what they do
    for adapter in add_lora(model, ["layers.*"], lora).values() if lora else ():
        torch.nn.init.normal_(adapter.lora_B, std=0.1)
    for module in model.modules() if router_bias else ():
        if isinstance(module, Router):
            module.bias = torch.zeros(module.experts, dtype=torch.float64)
    return model


def batch(number: int):
    """Rows of two documents, as many valid labels as the number has it."""
    numbers = torch.Generator().manual_seed(number)
    rows = []
    for _ in range(ROWS):
        cut = int(torch.randint(3, TOKENS - 3, (), generator=numbers))
        row = []
        for length in (cut, TOKENS - cut):
            ids = torch.randint(97, (length + 1,), generator=numbers)
            labels = ids[1:].clone()
            labels[torch.rand(length, generator=numbers) < 0.3] = NO_LABEL
            row.append((ids[:-1].numpy(), labels.numpy()))
        rows.append(row)
    return collate(rows, TOKENS, 2)


class Dealt:
    """Batches 0, 1, 2, …, of which a process takes its own, or its part of them; some are `taken` already."""

    def __init__(self, mesh: Mesh, taken: int = 0):
        self.mesh, self.rank, self.world, self.taken = mesh, mesh.index("data"), mesh.size("data"), taken

    def next_batch(self):
        self.taken += 1
        made = batch((self.taken - 1) * self.world + self.rank)
        parts = self.mesh.size("context")
        return cut_batch(made, "heads", self.mesh.index("context"), parts) if parts > 1 else made

    def loss(self, model, batch) -> Loss:
        return Loss(next_token_loss(model, batch), batch.valid, tokens=batch.ids.numel())


def train(
    family: str,
    mesh: Mesh,
    parallel: dict,
    accumulate: int,
    checkpointing: bool = False,
    layers: int = 0,
    *,
    steps: range = range(STEPS),
    saved: Path | None = None,
    balance: Mapping[str, float] = BALANCE,
    **settings,
) -> dict[str, torch.Tensor]:
    """Losses, norms, logits, and whole weights, averages and momenta after some steps, from what was saved of those before."""
    model = decoder(family, layers, router_bias=bool(balance["bias_rate"]), **settings)
    model.checkpointing = checkpointing
    recipe = read(Recipe, {
        "data": {"accumulate": accumulate, "batch": ROWS, "sequence": TOKENS}, "parallel": parallel, "optimizer": {"name": "sgd", "clip": 0.5}, "ema": {"decay": 0.5},
        "model": dict(balance),
    })  # fmt: skip
    placement = Placement(model, mesh, recipe.parallel.shard, schedule=recipe.parallel.schedule)
    found = after_steps(recipe, placement, Dealt(mesh, steps[0] * accumulate), steps, saved)
    model.eval()
    with torch.no_grad():
        found["logits"] = model.logits(model.hidden(batch(99).ids))
    placement.reshard()
    return found


def after_steps(
    recipe: Recipe, placement: Placement, objective: Any, steps: range = range(STEPS), saved: Path | None = None
) -> dict[str, torch.Tensor]:
    """Losses, norms, and whole weights, averages and momenta after some steps of SGD; `saved` are those before the first."""
    model, learned = placement.model, placement.parameters
    runner: Any = model
    if placement.mesh.size("context") > 1:
        runner = SequenceParallel(model, placement.mesh.group("context"), recipe.parallel.context_by)
    kinds = [[param for _, param in kind] for kind in hidden_and_others(learned.items())]
    optimizer = optim.SGD([{"params": kind} for kind in kinds], lr=0.5, momentum=0.9)
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], torch.tensor(group["lr"], dtype=torch.float64)
    average = AveragedWeights(learned, 0.5)
    kind = PipelineStep if placement.mesh.size("pipeline") > 1 else Step
    balancing = Balancing(model, recipe.model)
    step = kind(recipe, runner, objective, placement, optimizer, balancing, average, CPU)
    whole = WholeState(placement, optimizer, average)
    if saved:
        before = load_file(saved)
        named = lambda kind: {name.removeprefix(f"{kind} "): x for name, x in before.items() if name.startswith(kind)}
        whole.load_weights(named("weight"))
        whole.load_averages(named("average"))
        states = {int(number): {"momentum_buffer": x} for number, x in named("momentum").items()}
        whole.load_optimizer({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        balancing.load_state_dict(named("loads"))
    figures = []
    for number in steps:
        step.begin(number)
        set_rates(optimizer, 1.0)
        for micro in range(recipe.data.accumulate):
            step.micro_batch(objective.next_batch(), first=micro == 0)
        figures.append(step.update().double())
    states = whole.optimizer_state()["state"]
    found = {"figures": torch.stack(figures)}
    found |= {f"weight {name}": x for name, x in whole.weights(model.state_dict()).items()}
    found |= {f"average {name}": x for name, x in whole.averages().items()}
    found |= {f"loads {name}": x for name, x in balancing.state_dict().items()}
    if placement.mesh.first:
        found |= {f"momentum {number}": state["momentum_buffer"] for number, state in states.items()}
    return found


def alone(family: str, micro_batches: int, layers: int = 0) -> dict[str, torch.Tensor]:
    """What processes should find, from one that has all of their micro-batches."""
    return train(family, Mesh(), {}, micro_batches, layers=layers)


def together(_, families: list[str], parallel: dict, *how):
    world = torch.distributed.get_world_size()
    mesh = Mesh(Layout.fit(world, **{side: parallel.get(side, 1) for side in ("tensor", "pipeline", "expert")}))
    found = {}
    for family in families:
        made = train(family, mesh, parallel, *how)
        found |= {f"{family}: {name}": x for name, x in made.items()}
    return found
