"""Folders of codes that compressed-tensors itself writes, of any model whose projections are `torch.nn.Linear`."""

import json

import torch
from safetensors.torch import save_file

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


def write_compressed(folder, model, config, preset, ignore=("lm_head",), **weights):
    """Write a folder of a model's codes; its layers are left with the numbers that the codes stand for."""
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme = scheme.model_copy(update=dict(weights=scheme.weights.model_copy(update=weights)))
    apply_quantization_config(model, QuantizationConfig(config_groups=dict(group_0=scheme), ignore=list(ignore)))
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
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    for layer in layers:
        decompress_module(layer, leave_decompressed=False)
