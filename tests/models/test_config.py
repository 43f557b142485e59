"""Configurations that make no sense: the error names the key as config.json spells it."""

import pytest
import tiny_models as tiny

from tilestack import models
from tilestack.models import families


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama2", dict(model_type="gpt2"), "model_type 'gpt2' is not read; there are llama, "),
        ("llama2", dict(hidden_size=None), "lacks hidden_size"),
        ("llama2", dict(hidden_size=0), "hidden_size must be a positive whole number, not 0"),
        ("llama2", dict(num_hidden_layers="two"), "num_hidden_layers must be a positive whole number, not 'two'"),
        ("mistral", dict(num_hidden_layers="two"), "num_hidden_layers must be a positive whole number, not 'two'"),
        ("llama2", dict(num_attention_heads=0, head_dim=None), "num_attention_heads must be a positive whole number"),
        ("deepseek_v2", dict(v_head_dim=0), "v_head_dim must be a positive whole number"),
        ("llama2", dict(num_key_value_heads=3), "num_attention_heads, 4, must be a multiple of num_key_value_heads, 3"),
        ("llama2", dict(head_dim=15), "head_dim must be even"),
        ("llama2", dict(num_kv_heads=2, num_key_value_head=2), "'num_key_value_head'; did you mean"),
        ("llama2", dict(hidden_act="gelu"), "hidden_act must be silu, not 'gelu'"),
        ("llama2", dict(rope_scaling=dict(rope_type="proportional")), "rope_type must be one of .*'proportional'"),
        ("llama2", dict(rope_scaling=dict(rope_type="longrope")), "longrope lacks short_factor"),
        ("llama2", dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1"),
        (
            "llama2",
            dict(model_type="gemma3"),
            "model_type 'gemma3' is not read; .* its text model alone is gemma3_text",
        ),
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention must be false"),
        ("gemma2", dict(hidden_activation="gelu"), "hidden_activation must be gelu_pytorch_tanh, not 'gelu'"),
        ("gemma2", dict(layer_types=["chunked_attention"] * 4), "layer_types may name full_attention and"),
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping must be null for Gemma 3"),
        ("phi4_mini", dict(partial_rotary_factor=0.7), "head_dim must be even, and so must the part"),
        (
            "phi4_mini",
            dict(partial_rotary_factor=0.5),
            "short_factor must hold a factor for each of the 4 pairs, not 6",
        ),
        ("phi3", dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope_type must be default or longrope"),
        ("llama2", dict(rope_scaling=dict(type="linear")), "linear lacks factor"),
        ("llama2", dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "llama3 lacks low_freq_factor"),
        ("qwen3_moe", dict(num_experts_per_tok=9), "num_experts_per_tok is 9, more than the 8"),
        ("deepseek_v2", dict(attention_bias=True), "attention_bias must be false"),
        ("deepseek_v2", dict(topk_method="noaux_tc"), "topk_method must be greedy"),
        ("deepseek_v2", dict(scoring_func="sigmoid"), "scoring_func must be softmax"),
        ("deepseek_v2", dict(num_key_value_heads=2), "num_key_value_heads must equal"),
    ],
)
def test_an_error_names_the_key(family, change, message):
    given = tiny.config_of(family) | change
    if change.get("num_key_value_head"):
        del given["num_key_value_heads"]
    with pytest.raises(models.ConfigError, match=message):
        models.ModelConfig.from_hf(given)


QWENS = [name for name in families.FAMILIES if name.startswith("qwen")]


@pytest.mark.parametrize(
    ("family", "more"),
    [*((name, {}) for name in families.FAMILIES), *((name, {"use_sliding_window": True}) for name in QWENS)],
)
def test_what_a_config_leaves_out_is_as_transformers_has_it(family, more):
    from transformers import AutoConfig

    said = tiny.SIZES | dict(num_hidden_layers=30, bos_token_id=1) | more
    del said["max_position_embeddings"]
    said |= dict(num_key_value_heads=4) if family == "deepseek_v2" else {}
    whole = AutoConfig.for_model(family, **said).to_dict()
    assert models.ModelConfig.from_hf({"model_type": family, **said}) == models.ModelConfig.from_hf(whole)


def test_old_and_new_ways_to_write_rope_are_read_alike():
    old = tiny.config_of("llama3")
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    assert models.ModelConfig.from_hf(new) == models.ModelConfig.from_hf(old)


def test_every_nth_layer_of_qwen3_moe_is_a_mixture_counted_from_one():
    """With a step of 2 the second layer is the first mixture; a layer that is named besides is dense."""
    given = tiny.config_of("qwen3_moe") | dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert models.ModelConfig.from_hf(given).dense_layers == (0, 2, 3, 4)


def test_what_no_config_can_say_is_not_written():
    config = models.ModelConfig(97, 64, 80, layers=2, heads=4, kv_heads=2, head_dim=16, qkv_bias=True, qk_norm="head")
    with pytest.raises(models.ConfigError, match="a llama model has no words for this: qk_norm, output_bias"):
        config.to_hf()


def test_a_configuration_written_by_hand_has_no_foreign_keys():
    given = tiny.config_of("llama2") | {"_name_or_path": "somewhere"}
    models.ModelConfig.from_hf(given)
    with pytest.raises(models.ConfigError, match="the config has '_name_or_path'; it may have"):
        models.ModelConfig.from_hf(given, strict=True)
    del given["_name_or_path"], given["num_key_value_heads"]
    with pytest.raises(models.ConfigError, match="'kv_heads'; did you mean 'num_key_value_heads'"):
        models.ModelConfig.from_hf(given | {"kv_heads": 2}, strict=True)
