"""Folders of codes between here and transformers with compressed-tensors, both ways."""

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, code_layers, quantised, with_numbers
from compressed import BY_THEM, write_compressed

from tilestack import models
from tilestack.models.weights import unfused

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", ["smollm2", "llama_biased", "phi3"])
@torch.no_grad()
def test_transformers_reads_what_is_written_here(name, family, tmp_path):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    whole = dict(hidden_size=128, intermediate_size=256) if ALL[name].blocks else {}  # as they take inputs by blocks
    decoder = quantised(family, ALL[name], **whole)
    models.save(decoder, tmp_path / "model")
    plain = with_numbers(decoder)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    weights = dict(theirs.named_parameters())
    for weight_name, weight in unfused(plain):
        torch.testing.assert_close(weights[weight_name].detach(), weight, rtol=1e-6, atol=1e-7, msg=weight_name)
    run = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    found, truth = run(tiny.ids()).logits, plain(tiny.ids())
    if ALL[name].activations:  # which they round, and float32 does not here
        assert torch.nn.functional.cosine_similarity(found.flatten(), truth.flatten(), dim=0) > 0.99
    else:
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BY_THEM)
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@torch.no_grad()
def test_what_compressed_tensors_writes_is_read_here(name, family, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.SIZES, "hidden_size", 128)
    monkeypatch.setitem(tiny.SIZES, "intermediate_size", 192)
    preset, changes = BY_THEM[name]
    theirs = tiny.theirs(family)
    write_compressed(tmp_path / "model", theirs, theirs.config.to_dict(), preset, **changes)
    ours = models.load(tmp_path / "model")
    assert len(code_layers(ours)) == 4 * ours.config.layers
    weights = dict(theirs.named_parameters())
    for weight_name, weight in unfused(with_numbers(ours)):
        torch.testing.assert_close(weight, weights[weight_name].detach(), rtol=1e-6, atol=1e-7, msg=weight_name)
    torch.testing.assert_close(ours(tiny.ids()), theirs(tiny.ids()).logits, rtol=1e-4, atol=1e-4)
