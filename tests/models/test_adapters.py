"""Adapters on disk: what is saved is PEFT's, what is read need not be ours, and what is wrong is said."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ours

from tilestack.models.adapters import CONFIG, WEIGHTS, AdapterError, AdapterFile, load_adapters, save_adapters
from tilestack.models.weights import unfused
from tilestack.nn.lora import add_lora, lora_layers, merge_lora

decoder = functools.partial(ours, "llama2")
IDS = torch.tensor([[1, 5, 9, 3, 2, 7]])


def adapted(**settings):
    model = decoder()
    add_lora(model, ["layers.*"], **{"rank": 3, "alpha": 6.0} | settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.normal_(std=0.1)
    return model


def test_saved_adapters_give_the_same_model_again(tmp_path):
    model, twin = adapted(), decoder()
    save_adapters(model, tmp_path / "adapter", "runs/base")
    load_adapters(twin, tmp_path / "adapter")
    assert torch.equal(twin(IDS), model(IDS))
    assert not torch.equal(twin(IDS), decoder()(IDS))
    names = {name for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert names == {name for name in twin.state_dict() if "lora_" in name}


def test_a_pattern_is_of_whole_names_at_the_end(tmp_path):
    """up_proj is no part of gate_up_proj, which Phi-3 has."""
    save_adapters(adapted(), tmp_path)
    file = AdapterFile(tmp_path)
    file.config["rank_pattern"] = {"up_proj": 4, r"layers\.1\..*": 5}
    rank = lambda module: file.pattern("rank_pattern", module, 8)
    assert [rank(name) for name in ("up_proj", "layers.0.mlp.up_proj", "layers.0.mlp.gate_up_proj")] == [4, 4, 8]
    assert [rank(name) for name in ("model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj")] == [5, 8]


def test_the_files_are_what_peft_reads(tmp_path):
    """Its rule, written out: every adapted layer of Hugging Face's has W + alpha / r · B A."""
    model = adapted()
    save_adapters(model, tmp_path, "runs/base")
    config, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    expected = dict(unfused(decoder()))
    for module in config["target_modules"]:
        for name in [name for name in expected if name.endswith(f"{module}.weight")]:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = tensors.pop(f"{key}.lora_A.weight"), tensors.pop(f"{key}.lora_B.weight")
            assert a.shape[0] == b.shape[1] == config["r"]
            expected[name] = expected[name] + config["lora_alpha"] / config["r"] * b @ a
    assert not tensors
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "runs/base"
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    merge_lora(model)
    for name, tensor in unfused(model):
        torch.testing.assert_close(tensor, expected[name])


def test_adapters_of_some_parts_of_a_fused_layer_become_one(tmp_path):
    torch.manual_seed(2)
    plain = dict(unfused(decoder()))
    tensors, expected = {}, dict(plain)
    for layer, module in ((0, "q_proj"), (0, "v_proj"), (1, "q_proj")):
        name = f"model.layers.{layer}.self_attn.{module}"
        out, width = plain[f"{name}.weight"].shape
        a, b = torch.randn(2, width), torch.randn(out, 2)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        expected[f"{name}.weight"] = plain[f"{name}.weight"] + 8 / 2 * b @ a
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    model = decoder()
    load_adapters(model, tmp_path)
    merge_lora(model)
    for name, tensor in unfused(model):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.update({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(3, 16)}), "the model has no layer for base_model.model.model.layers.9"),
        (lambda c, t: t.clear(), "there are no adapters in adapter_model.safetensors"),
        (lambda c, t: c.update(r=4), "does not have rank 4"),
        (lambda c, t: c.update(use_dora=True), "only plain LoRA is read, and use_dora is True"),
        (lambda c, t: c.update(peft_type="IA3"), "only plain LoRA is read, and peft_type is 'IA3'"),
        (lambda c, t: c.update(alora_invocation_tokens=[7, 8]), r"and alora_invocation_tokens is \[7, 8\]"),
        (lambda c, t: c.update(layer_replication=[[0, 2], [1, 2]]), "and layer_replication is"),
        (lambda c, t: c.update(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' has taken the first adapters out"),
        (lambda c, t: c.update(init_lora_weights="OLoRA"), "'OLoRA' has taken the first adapters out"),
        (lambda c, t: c.pop("r"), "must have numbers under r and lora_alpha"),
    ],
)  # fmt: skip
def test_what_does_not_belong_to_the_model_is_refused_and_the_model_left_alone(tmp_path, change, message):
    save_adapters(adapted(), tmp_path)
    config, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    change(config, tensors)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS)
    model = decoder()
    with pytest.raises(AdapterError, match=message):
        load_adapters(model, tmp_path)
    assert not lora_layers(model)


def test_a_folder_without_adapters_is_named(tmp_path):
    with pytest.raises(AdapterError, match="holds no adapters"):
        load_adapters(decoder(), tmp_path)
    with pytest.raises(AdapterError, match="no adapters to save"):
        save_adapters(decoder(), tmp_path)
