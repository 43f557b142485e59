"""What `models.save` writes of a decoder of codes, `models.load` reads: the same codes, bit for bit."""

import json
import re

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, KINDS, SIZES, code_layers, quantised, same
from safetensors import safe_open

from tilestack import models
from tilestack.quant.linear import quantise_linear

FAMILIES = ["smollm2", "llama_biased", "qwen3", "phi3", "glm4", "gemma3"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_codes_come_back_bit_for_bit(name, family, tmp_path):
    decoder = quantised(family, ALL[name])
    models.save(decoder, tmp_path / "model", shard_size=20_000)
    again = models.load(tmp_path / "model")
    here, there = code_layers(decoder), code_layers(again)
    assert list(here) == list(there)
    assert len(here) == 4 * decoder.config.layers
    for path, layer in here.items():
        for one, other in zip(layer.kept, there[path].kept, strict=True):
            assert same(one, other), path
        assert all(getattr(there[path].scheme, each) == getattr(ALL[name], each) for each in KINDS)
    ids = tiny.ids()
    assert again(ids).equal(decoder(ids))


@torch.no_grad()
def test_layers_may_differ_in_their_schemes(tmp_path):
    """Attention of int8 with codes of inputs, feed-forward of int4, and the last layer's as it is."""
    decoder = tiny.ours("qwen3", **SIZES)
    for layer in decoder.layers:
        quantise_linear(layer.attention.qkv, ALL["w8a8"])
        quantise_linear(layer.attention.output, ALL["w8a8"])
    quantise_linear(decoder.layers[0].mlp.gate_up, ALL["w4a16"])
    quantise_linear(decoder.layers[0].mlp.down, ALL["w4a16"])
    models.save(decoder, tmp_path / "model")
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    assert "model.layers.1.mlp.down_proj" in said["ignore"]
    again = models.load(tmp_path / "model")
    schemes = {path: layer.scheme for path, layer in code_layers(again).items()}
    assert {path for path, scheme in schemes.items() if scheme.activations == "int8"} == {
        f"layers.{layer}.attention.{name}" for layer in (0, 1) for name in ("qkv", "output")
    }
    assert again(tiny.ids()).equal(decoder(tiny.ids()))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2"])
def test_experts_and_routers_are_named_as_what_is_not_quantised(family, tmp_path):
    """Others read from the config alone which linear layers hold codes."""
    decoder = quantised(family, ALL["w8a16"])
    models.save(decoder, tmp_path / "model")
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    ignored = lambda layer: any(
        re.match(name[3:], layer) if name.startswith("re:") else name == layer for name in said["ignore"]
    )
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    plain = {name.removesuffix(".weight") for name in names if name.endswith(("proj.weight", "gate.weight"))}
    plain |= {name.removesuffix(".weight") for name in names if ".experts." in name}
    coded = {name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")}
    assert any(".experts." in layer for layer in plain)
    assert coded
    assert all(map(ignored, plain))
    assert not any(map(ignored, coded))


@torch.no_grad()
def test_rows_shorter_than_a_group_come_back_beside_rows_of_many(tmp_path):
    """Rows of 64 have one scale, as rows of fewer than two groups of 128 do; their own group fits, the first does not."""
    decoder = quantised("llama3", ALL["w4a16"], hidden_size=256, intermediate_size=256, head_dim=16)
    assert [layer.code_scale.shape[1] for layer in code_layers(decoder).values()] == [2, 1, 2, 2] * 2
    models.save(decoder, tmp_path / "model")
    assert models.load(tmp_path / "model")(tiny.ids()).equal(decoder(tiny.ids()))


def test_a_matrix_whose_blocks_begin_before_it_is_not_written(tmp_path):
    decoder = tiny.ours("qwen3", **SIZES)  # gate and up of 96 rows, and a block has 128
    quantise_linear(decoder.layers[0].mlp.gate_up, ALL["fp8 blocks"])
    with pytest.raises(models.CheckpointError, match=r"up_proj cannot be written: its blocks do not begin with it"):
        models.save(decoder, tmp_path / "model")
    assert not (tmp_path / "model").exists()
