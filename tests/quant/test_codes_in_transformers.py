"""Folders of codes between here and transformers with compressed-tensors, both ways."""

import json

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, code_layers, quantised, with_numbers
from safetensors.torch import save_file

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


def written_by_them(folder, preset, family, **weights):
    """A folder of codes by compressed-tensors itself; its model, with the numbers that the codes stand for."""
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized

    model = tiny.theirs(family)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme = scheme.model_copy(update=dict(weights=scheme.weights.model_copy(update=weights)))
    config = QuantizationConfig(config_groups=dict(group_0=scheme), ignore=["lm_head"])
    apply_quantization_config(model, config)
    layers = [layer for layer in model.modules() if is_module_quantized(layer)]
    for layer in layers:
        arguments, shape = layer.quantization_scheme.weights, layer.weight_scale.shape
        weight = layer.weight.detach()
        if arguments.strategy == "tensor":
            parts = weight.reshape(1, -1)
        elif arguments.strategy == "block":
            down, across = shape
            parts = torch.nn.functional.pad(
                weight, (0, across * 128 - weight.shape[1], 0, down * 128 - weight.shape[0])
            )
            parts = parts.unflatten(0, (down, 128)).unflatten(2, (across, 128)).transpose(1, 2).flatten(2)
        else:
            parts = weight.unflatten(1, (shape[1], -1))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
        layer.weight_scale.data = scale.reshape(shape)
        layer.weight_zero_point.data = zero.reshape(shape)
    for layer in layers:
        compress_module(layer)
    formats = {layer.quantization_scheme.format for layer in layers}
    folder.mkdir()
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )
    said = QuantizationConfig.from_pretrained(model, formats.pop()).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": said}))
    for layer in layers:
        decompress_module(layer, leave_decompressed=False)
    return model


BY_THEM = {
    "FP8": ("FP8", {}),  # with static scales of inputs, which are not used here
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}),
    "FP8_BLOCK": ("FP8_BLOCK", {}),
    "W8A8": ("W8A8", {}),
    "W8A8 of tensors": ("W8A8", dict(strategy="tensor")),
    "W8A16": ("W8A16", dict(strategy="channel", group_size=None)),
    "W4A16 in groups of 32": ("W4A16", dict(group_size=32)),
    "W4A16 in groups of 64, with zeros": ("W4A16_ASYM", dict(group_size=64)),
    "W4A16 by rows": ("W4A16", dict(strategy="channel", group_size=None)),
    "W4A16 by rows, with zeros": ("W4A16_ASYM", dict(strategy="channel", group_size=None)),
}


@pytest.mark.parametrize("name", BY_THEM)
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@torch.no_grad()
def test_what_compressed_tensors_writes_is_read_here(name, family, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.SIZES, "hidden_size", 128)
    monkeypatch.setitem(tiny.SIZES, "intermediate_size", 192)
    preset, changes = BY_THEM[name]
    theirs = written_by_them(tmp_path / "model", preset, family, **changes)
    ours = models.load(tmp_path / "model")
    assert len(code_layers(ours)) == 4 * ours.config.layers
    weights = dict(theirs.named_parameters())
    for weight_name, weight in unfused(with_numbers(ours)):
        torch.testing.assert_close(weight, weights[weight_name].detach(), rtol=1e-6, atol=1e-7, msg=weight_name)
    torch.testing.assert_close(ours(tiny.ids()), theirs(tiny.ids()).logits, rtol=1e-4, atol=1e-4)
