"""Experts of codes between here and transformers with compressed-tensors, both ways."""

import json

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, MIXTURES, SIZES_OF_MIXTURES, mixtures, quantised_mixture, with_numbers
from compressed import BY_THEM, write_compressed
from packaging.version import Version
from published import publish

from tilestack import models
from tilestack.models.quantise import quantise
from tilestack.models.weights import unfused
from tilestack.nn import MoE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

# What their loader of experts has no code for: zero points, and scales of blocks in compressed-tensors.
WHAT_THEY_READ = [name for name, scheme in ALL.items() if scheme.symmetric and not scheme.blocks]
ROUNDS_FP8 = pytest.mark.skipif(
    Version("5.17") <= Version(transformers.__version__) < Version("5.21"),
    reason="transformers 5.17 to 5.20 make bfloat16 of fp8 experts, whatever dtype is asked for",
)


def theirs_of(folder, **more):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)


@pytest.mark.parametrize("name", [pytest.param(n, marks=ROUNDS_FP8 if n == "fp8" else ()) for n in WHAT_THEY_READ])
@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_transformers_reads_what_is_written_here(name, family, tmp_path):
    from transformers import CompressedTensorsConfig

    decoder = quantised_mixture(family, ALL[name])
    models.save(decoder, tmp_path / "model")
    plain = with_numbers(decoder)
    theirs = theirs_of(tmp_path / "model", quantization_config=CompressedTensorsConfig(dequantize=True))
    for ours, layer in zip(plain.layers, theirs.model.layers, strict=True):
        for weight in ("gate_up", "down") if isinstance(ours.mlp, MoE) else ():
            found = getattr(layer.mlp.experts, f"{weight}_proj").detach()
            torch.testing.assert_close(found, getattr(ours.mlp, weight).detach(), rtol=1e-6, atol=1e-7)
    found, truth = theirs(tiny.ids()).logits, plain(tiny.ids())
    if ALL[name].activations:  # which they round in attention, and float32 does not here
        assert torch.nn.functional.cosine_similarity(found.flatten(), truth.flatten(), dim=0) > 0.98
    else:
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_transformers_reads_experts_beside_attention_that_is_kept(family, tmp_path):
    decoder = tiny.ours(family, **SIZES_OF_MIXTURES[family])
    quantise(decoder, ALL["w4a16"], ignore=["*.attention.*"])
    models.save(decoder, tmp_path / "model")
    found = theirs_of(tmp_path / "model")(tiny.ids()).logits
    torch.testing.assert_close(found, with_numbers(decoder)(tiny.ids()), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_fp8_by_blocks_is_read_as_they_read_it(tmp_path):
    """Qwen3's own fp8 files, which they make numbers of where there is no GPU."""
    from transformers import FineGrainedFP8Config

    decoder = tiny.ours("qwen3_moe", **SIZES_OF_MIXTURES["qwen3_moe"])
    models.save(decoder, tmp_path / "model")
    publish(tmp_path / "model", "fp8 by DeepSeek")
    ours = models.load(tmp_path / "model")
    assert len(mixtures(ours)) == 1
    theirs = theirs_of(tmp_path / "model", quantization_config=FineGrainedFP8Config(dequantize=True))
    torch.testing.assert_close(ours(tiny.ids()), theirs(tiny.ids()).logits, rtol=1e-4, atol=1e-4)


def as_linears(decoder):
    """The tensors of a decoder's checkpoint as modules, each matrix but embedding and routers a linear layer."""
    root = torch.nn.Module()
    for name, weight in unfused(decoder):
        *path, last, kind = name.split(".")
        above = root
        for part in path:
            if part not in dict(above.named_children()):
                above.add_module(part, torch.nn.Module())
            above = above.get_submodule(part)
        plain = weight.ndim < 2 or last in ("embed_tokens", "gate", "lm_head")
        layer = torch.nn.Module() if plain else torch.nn.Linear(*reversed(weight.shape), bias=False)
        layer.register_parameter(kind, torch.nn.Parameter(weight.detach().clone()))
        above.add_module(last, layer)
    return root


@pytest.mark.parametrize("name", BY_THEM)
@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_what_compressed_tensors_writes_is_read_here(name, family, tmp_path):
    preset, changes = BY_THEM[name]
    wide = dict(intermediate_size=192, moe_intermediate_size=192, hidden_size=128)
    wide |= dict(kv_lora_rank=64, q_lora_rank=64, v_head_dim=32) if family == "deepseek_v2" else {}
    plain = tiny.ours(family, **wide)
    theirs = as_linears(plain)
    write_compressed(tmp_path / "model", theirs, plain.config.to_hf(), preset, **changes)
    ours = models.load(tmp_path / "model")
    assert mixtures(ours)
    weights = dict(theirs.named_parameters())
    for weight_name, weight in unfused(with_numbers(ours)):
        torch.testing.assert_close(weight, weights[weight_name].detach(), rtol=1e-6, atol=1e-7, msg=weight_name)


@torch.no_grad()
def test_int8_experts_of_quantised_inputs_are_written_as_weights_alone(tmp_path):
    """Their loader leaves plain int8 experts out and draws new ones; in words of int8 it reads them."""
    decoder = tiny.ours("mixtral", **SIZES_OF_MIXTURES["mixtral"])
    quantise(decoder, ALL["w8a8"])
    models.save(decoder, tmp_path / "model")
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    formats = {group["targets"][0].partition(".")[0]: group["format"] for group in said["config_groups"].values()}
    assert formats == {"model": "int-quantized", "re:": "pack-quantized"}
    found, truth = theirs_of(tmp_path / "model")(tiny.ids()).logits, with_numbers(decoder)(tiny.ids())
    assert torch.nn.functional.cosine_similarity(found.flatten(), truth.flatten(), dim=0) > 0.98
