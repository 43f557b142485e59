"""Muon as recipes ask for it: a decoder's fused projections apart, the rest with AdamW, bfloat16 with a master copy."""

import pytest
import torch
from small import CONFIG, decoder
from tiny import recipe

from tilestack import models, ops
from tilestack.models.weights import rows_of_matrices
from tilestack.train import RecipeError
from tilestack.train.optimizers import make_optimizer

IDS = torch.arange(12).view(2, 6)
PHI3 = CONFIG | {"model_type": "phi3", "vocab_size": 64, "pad_token_id": 0}
MIXTRAL = CONFIG | {"model_type": "mixtral", "vocab_size": 64, "num_local_experts": 3}


def made(model, **sections):
    settings = recipe(optimizer={"name": "muon", "muon_lr": 0.1, "weight_decay": 0.0}, **sections)
    return make_optimizer(model, settings.optimizer, settings.precision, 0)


def test_each_matrix_of_a_fused_projection_moves_by_itself():
    """Gate's rows by Newton–Schulz of their gradient alone, and up's by that of theirs."""
    model = decoder()
    gate_up = model.layers[0].mlp.gate_up.weight
    before = gate_up.detach().clone()
    optimizer = made(model)
    gate_up.grad = torch.randn(gate_up.shape)  # of full rank, which that of a few tokens is not
    optimizer.step()
    moved = before - gate_up.detach()
    for found, gradient in zip(moved.split(32), gate_up.grad.split(32), strict=True):
        expected = 0.1 * 2**0.5 * ops.newton_schulz(gradient)  # the rule's factor of 32 rows by 16 columns
        assert float((found - expected).norm() / expected.norm()) < 0.03  # bfloat16
    together = 0.1 * 2 * ops.newton_schulz(gate_up.grad)
    assert float((moved - together).norm() / together.norm()) > 0.1


@pytest.mark.parametrize("config", [PHI3, MIXTRAL])
def test_what_families_keep_fused_is_split_all_the_same(config):
    model = models.Decoder(models.ModelConfig.from_hf(config))
    rows = rows_of_matrices(model.config)
    assert rows["layers.0.attention.qkv.weight"] == [16, 8, 8]
    wide = rows["layers.1.mlp.gate_up.weight" if config is PHI3 else "layers.1.mlp.gate_up"]
    assert wide == ([32] * 2 if config is PHI3 else [32] * 6)
    parameters = dict(model.named_parameters())
    assert all(sum(some) == parameters[name].shape[:-1].numel() for name, some in rows.items())
    assert "embedding.weight" not in rows
    names = {group["use_muon"]: group["param_names"] for group in made(model).param_groups}
    assert {name for name, p in parameters.items() if p.ndim < 2 or "router" in name} < set(names[False])
    assert "layers.0.attention.qkv.weight" in names[True]


def test_a_model_with_biases_is_trained():
    """Its fused biases have a line in the table of rows, and are no matrices."""
    biased = CONFIG | {"model_type": "qwen2", "vocab_size": 64}
    model = models.Decoder(models.ModelConfig.from_hf(biased))
    assert "layers.0.attention.qkv.bias" in rows_of_matrices(model.config)
    names = {group["use_muon"]: group["param_names"] for group in made(model).param_groups}
    assert "layers.0.attention.qkv.weight" in names[True]
    assert "layers.0.attention.qkv.bias" in names[False]


def test_bfloat16_parameters_need_a_master_copy():
    half = {"parameters": "bfloat16", "compute": "bfloat16"}
    with pytest.raises(RecipeError, match=r'optimizer\.name "muon" has no precision\.updates = "stochastic"'):
        recipe(optimizer={"name": "muon"}, precision=half)
    model = decoder().bfloat16()
    optimizer = made(model, precision=half | {"updates": "master"})
    model(IDS).float().square().mean().backward()
    optimizer.step()
    assert all(state["master_param"].dtype == torch.float32 for state in optimizer.state.values())


def test_the_rule_is_the_recipes():
    settings = recipe(optimizer={"name": "muon", "muon_rule": "match_rms_adamw"})
    optimizer = make_optimizer(decoder(), settings.optimizer, settings.precision, 0)
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
