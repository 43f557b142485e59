"""GGUF files of every architecture that is read, written as llama.cpp's converter does: the logits of the original.

Names come from the package gguf; what the converter does to values is written out here: the order of queries and keys
in llama and granite, the 1 added to Gemma's norms, factors of longrope as tensors, multipliers under names of their own.
"""

import itertools

import gguf
import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models.gguf_config import Settings, gemma, rotary_factor_of
from tilestack.models.weights import unfused

ARCHITECTURES = {
    "llama2": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi4_mini_long": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm4": "glm4",
}
# What llama.cpp has in its code and no key for: the pattern of windows, the base of Gemma 3's local RoPE, biases that
# the original models do not have, and scores scaled by a head's size.
AS_RELEASED = {
    "gemma2": dict(query_pre_attn_scalar=24),
    "gemma3": dict(query_pre_attn_scalar=24, sliding_window_pattern=6, num_hidden_layers=7),
    "olmo2": dict(attention_bias=False),
    "granite": dict(mlp_bias=False),
}


def in_pairs(weight, heads):
    """As llama.cpp turns queries and keys: the two elements of a pair are neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(decoder, architecture, path):
    config, writer = decoder.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_base)
    if architecture != "granite":
        writer.add_key_length(config.head_dim)
    if architecture not in ("gemma2", "gemma3"):
        writer.add_rope_dimension_count(config.rotary_dim)
    if any(config.windows):
        writer.add_sliding_window(next(filter(None, config.windows)))
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_scale)
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(config.logit_divisor)
    if config.rope_scaling:
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling["original_max_position_embeddings"])
        for kind in ("short", "long"):
            factors = torch.tensor(config.rope_scaling[f"{kind}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.layers)
    for name, tensor in unfused(decoder):
        tensor = tensor.clone()
        if architecture in ("llama", "granite") and ".q_proj." in name:
            tensor = in_pairs(tensor, config.heads)
        if architecture in ("llama", "granite") and ".k_proj." in name:
            tensor = in_pairs(tensor, config.kv_heads)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + 1
        theirs = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"gguf has no name for {name}"
        writer.add_tensor(theirs, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_gives_the_logits_of_the_original(family, tmp_path):
    decoder, ids = tiny.ours(family, **AS_RELEASED.get(family, {})), tiny.ids()
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    write(decoder, ARCHITECTURES[family], tmp_path / "model.gguf")
    found = models.load(tmp_path / "model.gguf")
    expected = decoder(ids)
    assert (found(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma4", "GGUF files of llama, .* are read, not of 'gemma4'"),
        ("llama.expert_count", 8, "lacks llama.expert_used_count"),
        ("llama.attention.head_count", [2], r"num_attention_heads must be a positive whole number, not \[2\]"),
        ("llama.rope.dimension_count", 8, "partial_rotary_factor must be 1"),
        ("llama.context_length", None, "lacks llama.context_length"),
    ],
)
def test_what_is_not_read_is_named(key, value, message, tmp_path):
    tiny.write_gguf(tmp_path / "model.gguf")
    source = models.gguf.GGUF(tmp_path / "model.gguf")
    source.metadata[key] = value
    with pytest.raises(models.ConfigError, match=message):
        _ = source.config


@pytest.mark.parametrize(
    ("said", "ends"),
    [({}, ()), (dict(eos=3), (3,)), (dict(eos=3, eot=5, eom=7), (3, 5, 7)), (dict(eos=3, eot=3), (3,))],
)
def test_a_text_ends_with_every_token_that_the_file_says_ends_one(said, ends, tmp_path):
    tiny.write_gguf(tmp_path / "model.gguf")
    source = models.gguf.GGUF(tmp_path / "model.gguf")
    source.metadata |= {f"tokenizer.ggml.{name}_token_id": number for name, number in said.items()}
    assert source.config.eos == ends


SCALING = "llama.rope.scaling"
LINEAR = dict(rope_type="linear", factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({f"{SCALING}.factor": 4.0}, LINEAR),  # llama.cpp takes it for linear where no type is named
        ({"llama.rope.scale_linear": 4.0}, LINEAR),  # of files before there were types
        ({f"{SCALING}.factor": 4.0, f"{SCALING}.type": "none"}, None),
        ({f"{SCALING}.type": "linear"}, None),
        (
            {f"{SCALING}.type": "yarn", f"{SCALING}.factor": 4.0, f"{SCALING}.yarn_beta_fast": 16.0},
            LINEAR | dict(rope_type="yarn", beta_fast=16.0),
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_scales_them(said, expected, tmp_path):
    tiny.write_gguf(tmp_path / "model.gguf")
    source = models.gguf.GGUF(tmp_path / "model.gguf")
    source.metadata |= said
    assert source.config.rope_scaling == expected


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor"])
def test_factors_of_rotations_that_are_not_read_are_refused(key, tmp_path):
    tiny.write_gguf(tmp_path / "model.gguf")
    source = models.gguf.GGUF(tmp_path / "model.gguf")
    source.metadata |= {f"{SCALING}.type": "yarn", f"{SCALING}.factor": 4.0, f"{SCALING}.{key}": 0.5}
    with pytest.raises(models.ConfigError, match=f"{key} is 0.5; other factors than 1 are not read"):
        _ = source.config


@pytest.mark.parametrize(("layers", "scalar"), [(45, 32), (46, 20)])
def test_scores_of_the_largest_gemma_are_scaled_by_another_size(layers, scalar):
    """Which the file does not say: llama.cpp knows it by its layers."""
    said = dict(block_count=layers, embedding_length=80) | {"attention.head_count": 4, "attention.key_length": 32}
    of = Settings({"general.architecture": "gemma2", **{f"gemma2.{key}": value for key, value in said.items()}})
    assert gemma(of, largest=46)["query_pre_attn_scalar"] == scalar


def test_as_much_of_a_head_is_turned_as_the_file_says():
    """The share is a fraction, and what it makes of the head is rounded down: 30 / 44 of 44 would be 29."""
    said = {"general.architecture": "phi3", "phi3.embedding_length": 64, "phi3.attention.head_count": 1}
    for turned, size in itertools.combinations(range(2, 130, 2), 2):
        own = {"phi3.attention.key_length": size, "phi3.rope.dimension_count": turned}
        assert int(size * rotary_factor_of(Settings(said | own))) == turned


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_weights_from_the_file(family, tmp_path):
    """A second opinion on names and norms, of the architectures that transformers reads from GGUF files itself."""
    from transformers import AutoModelForCausalLM

    decoder = tiny.ours(family, **AS_RELEASED.get(family, {}))
    write(decoder, ARCHITECTURES[family], tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ours = dict(unfused(models.load(tmp_path / "model.gguf")))
    parameters = dict(theirs.named_parameters())
    assert len(ours) > 10
    assert all(torch.allclose(parameters[name], tensor, atol=1e-6) for name, tensor in ours.items())
