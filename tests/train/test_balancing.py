"""Mixtures of experts under the trainer: they learn, their loads even out, and several micro-batches count as one step."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from tiny import Counting, TinyModel, recipe
from torch import nn

from tilestack.nn import MoE
from tilestack.nn.router import imbalance
from tilestack.train import RecipeError, Trainer, metrics
from tilestack.train.balancing import Balancing
from tilestack.train.errors import TrainingError
from tilestack.train.recipe import Model

EXPERTS = 8


def mixtures(**options):
    """The tiny model with mixtures for layers, whose routers all but ignore most of their experts."""
    torch.manual_seed(0)
    model = TinyModel()
    model.layers = nn.ModuleList([MoE(8, 16, EXPERTS, 2, **options) for _ in range(2)])
    with torch.no_grad():
        model.embedding.weight += 0.5
        for layer in model.layers:
            layer.router.weight *= 0.3
            layer.router.weight[:2] += 0.2
    return model


def run(model, folder, **settings):
    steps = recipe(run={"steps": 80, "log_every": 40}, optimizer={"lr": 0.01}, checkpoint={"every": 0}, model=settings)
    Trainer(steps, model, Counting(batch=16), folder).run()
    return {name: metrics.curve(folder, name)[1] for name in ("loss", "imbalance", "dead_experts")}


BALANCED = {
    "auxiliary loss": (dict(), dict(auxiliary_loss=0.1)),
    "bias": (dict(scoring="sigmoid", bias_balancing=True), dict(auxiliary_loss=0.0, bias_rate=0.01)),
}


@pytest.mark.parametrize(("options", "settings"), BALANCED.values(), ids=BALANCED.keys())
def test_a_skewed_model_learns_and_balances(options, settings, tmp_path):
    left_alone = run(mixtures(**options), tmp_path / "alone", **settings | dict(auxiliary_loss=0.0, bias_rate=0.0))
    balanced = run(mixtures(**options), tmp_path / "balanced", **settings)
    settled = lambda curve: sum(curve[-20:]) / 20
    assert balanced["imbalance"][0] > 2
    assert balanced["loss"][-1] < 0.3 * balanced["loss"][0]
    assert settled(balanced["imbalance"]) < 0.75 * settled(left_alone["imbalance"])
    assert balanced["dead_experts"][-1] == 0


def test_micro_batches_move_a_bias_once_by_all_their_loads(tmp_path):
    model = mixtures(bias_balancing=True)
    loads = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, *_: loads.append(layer.balance.tokens_per_expert))
    settings = recipe(run={"steps": 1}, data={"accumulate": 3}, model={"bias_rate": 0.5}, checkpoint={"every": 0})
    trainer = Trainer(settings, model, Counting(), tmp_path)
    trainer.train_step()
    for number, layer in enumerate(model.layers):
        load = sum(loads[number::2]).float()
        assert torch.equal(trainer.balancing.windows[number].total(), load.long())
        assert torch.equal(layer.router.bias, 0.5 * torch.sign(load.mean() - load))


def test_the_loads_of_a_step_are_forgotten_in_the_next(tmp_path):
    model, loads = mixtures(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, *_: loads.append(layer.balance.tokens_per_expert.clone()))
    settings = recipe(run={"steps": 3}, data={"accumulate": 2}, checkpoint={"every": 0})
    trainer = Trainer(settings, model, Counting(), tmp_path)
    for _ in range(3):
        loads.clear()
        trainer.train_step()
        worst = max(imbalance(loads[layer] + loads[layer + 2]) for layer in (0, 1))
        assert trainer.pending[-1].figure("imbalance") == worst


def test_a_broken_step_and_those_after_it_leave_biases_where_they_were(tmp_path):
    """As all other weights: the broken step is kept with those that it began with."""
    settings = recipe(run={"steps": 4, "log_every": 4}, model={"bias_rate": 0.5}, checkpoint={"every": 0})
    with pytest.raises(TrainingError, match="step 2"):
        Trainer(settings, mixtures(bias_balancing=True), Counting(spoil=2), tmp_path / "broken").run()
    kept = load_file(tmp_path / "broken" / "broken-step-000002" / "weights.safetensors")
    before = Trainer(settings, mixtures(bias_balancing=True), Counting(), tmp_path / "one")
    before.train_step()
    for name, value in before.model.state_dict().items():
        assert torch.equal(kept[name], value), name


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_balance_costs_the_same_in_models_of_any_depth(layers):
    """As in transformers, whose loss is over all layers together: where they route alike, that is the mean."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.manual_seed(0)
    first, x = MoE(8, 16, EXPERTS, 2), torch.randn(60, 8)
    model = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(layers - 1))])
    balancing = Balancing(model, Model(auxiliary_loss=1.0, z_loss=0.0))
    for layer in model:
        layer(x)
    logits = x @ first.router.weight.T
    torch.testing.assert_close(balancing.loss(), modeling.load_balancing_loss_func((logits,) * layers, EXPERTS, 2))
    twice = Balancing(model, Model(auxiliary_loss=0.5, z_loss=0.25))
    expected = 0.5 * first.balance.auxiliary_loss + 0.25 * first.balance.z_loss
    torch.testing.assert_close(twice.loss(), expected)


def test_a_rate_for_biases_that_are_not_there_is_refused():
    for model in (mixtures(), TinyModel()):
        with pytest.raises(
            RecipeError, match=r"model\.bias_rate moves the biases of routers, and this model has no router"
        ):
            Balancing(model, Model(bias_rate=0.01))
    assert Balancing(mixtures(bias_balancing=True), Model(bias_rate=0.01)).mixtures
    assert Model().bias_rate == 0
