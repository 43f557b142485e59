"""Weights of bfloat16 beside float32 masters: nothing is cast on the way, losses are those of float32 weights, and a run goes
on to the bit."""

import json
from pathlib import Path

import torch
from small import decoder
from test_static_step import everything, train
from tiny import recipe

from tilestack.data import pack
from tilestack.models.decoder import Layer
from tilestack.nn import Linear
from tilestack.train import Recipe, execution
from tilestack.train.next_token import next_token_loss

RECIPES = Path(__file__).parents[2] / "recipes"
MASTER = {"parameters": "bfloat16", "compute": "bfloat16", "updates": "master"}
AUTOCAST = {"parameters": "float32", "compute": "bfloat16"}


def casts_of_a_forward(precision) -> list[str]:
    """Where the dtypes of what meets in a decoder differ: at products, and where a block is added to the residual stream."""
    made, model, found = recipe(precision=precision), decoder(), []

    def product(module: Linear, given: tuple[torch.Tensor]) -> None:
        if given[0].dtype != module.weight.dtype or torch.is_autocast_enabled("cpu"):
            found.append("product")

    def layer(module: Layer, given: tuple, made: tuple[torch.Tensor, torch.Tensor]) -> None:
        if made[0].dtype != made[1].dtype:
            found.append("residual")

    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(product)
        if isinstance(module, Layer):
            module.register_forward_hook(layer)
    runner = execution.prepare(model, made, torch.device("cpu"))
    (batch,) = pack([(list(range(1, 20)), list(range(2, 21)))], 24, 1)
    with execution.autocast(made.precision, torch.device("cpu")):
        next_token_loss(runner, batch).backward()
    return found


def test_between_operators_nothing_is_cast_where_weights_are_what_is_computed_in():
    assert casts_of_a_forward(MASTER) == []
    assert set(casts_of_a_forward(AUTOCAST)) == {"product", "residual"}


def test_the_recipe_for_a_gpu_keeps_masters_and_casts_nothing():
    precision = Recipe.load(RECIPES / "demo-gpu.toml").precision
    assert (precision.parameters, precision.compute, precision.updates) == tuple(MASTER.values())


def losses(folder, precision) -> torch.Tensor:
    train(folder, "off", run={"steps": 60, "skip_broken": 0}, precision=precision, data={"accumulate": 1})
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([row["loss"] for row in rows if "loss" in row])


def test_losses_are_those_of_float32_weights(tmp_path):
    """With masters a run stays beside the one under autocast, which rounds the same products."""
    wide, half = losses(tmp_path / "wide", AUTOCAST), losses(tmp_path / "half", MASTER)
    assert wide[-1] < 0.5 * wide[0]
    torch.testing.assert_close(half, wide, rtol=0.02, atol=0.02)


def test_a_run_with_masters_goes_on_to_the_bit(tmp_path):
    sections = dict(precision=MASTER, data={"accumulate": 1}, checkpoint={"every": 0})
    train(tmp_path / "whole", "on", **sections)
    stopped = train(tmp_path / "resumed", "on", stop=11, **sections)
    train(tmp_path / "resumed", "on", **sections)
    assert not stopped.finished
    assert everything(tmp_path / "whole") == everything(tmp_path / "resumed")
    states = torch.cat([state["master_param"].flatten() for state in stopped.optimizer.state.values()])
    assert states.dtype == torch.float32
    assert not torch.equal(states, states.bfloat16().float())  # they hold what bfloat16 cannot
