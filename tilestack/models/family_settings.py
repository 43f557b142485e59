"""How each family's config.json says what is not one key for one field: `read_…` from its keys, `write_…` back to them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilestack.models.keys import ConfigError, shown

if TYPE_CHECKING:
    from tilestack.models.config import ModelConfig

Fields = dict[str, Any]  # of ModelConfig, by name


def value(given: Mapping[str, Any], key: str, default: Any) -> Any:
    """What a key holds; null is as good as no key."""
    return default if given.get(key) is None else given[key]


def read_llama(given: Mapping[str, Any], fields: Fields) -> Fields:
    bias = bool(given.get("attention_bias", False))
    return dict(qkv_bias=bias, output_bias=bias)


def write_llama(config: "ModelConfig") -> dict[str, Any]:
    return dict(attention_bias=config.qkv_bias)


def read_mistral(given: Mapping[str, Any], fields: Fields) -> Fields:
    window = given.get("sliding_window", 4096)
    return dict(windows=(window,) * fields["layers"] if window else ())


def write_mistral(config: "ModelConfig") -> dict[str, Any]:
    return dict(sliding_window=config.window(0))


def read_qwen(given: Mapping[str, Any], fields: Fields) -> Fields:
    """From a layer on (`max_window_layers`), or in those that `layer_types` names, Qwen's layers have a window."""
    window = given.get("sliding_window", 4096) if given.get("use_sliding_window") else None
    first = value(given, "max_window_layers", 28)
    slides = sliding_layers(given, [layer >= first for layer in range(fields["layers"])])
    windows = tuple(window if slide else None for slide in slides)
    return dict(windows=windows if any(windows) else (), qkv_bias=True)


def sliding_layers(given: Mapping[str, Any], usual: list[bool]) -> list[bool]:
    """Which layers have a window: those that `layer_types` names, or else the usual ones."""
    kinds = given.get("layer_types") or []
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise ConfigError(f"layer_types may name full_attention and sliding_attention, not {shown(unknown[0])}")
    return [kind == "sliding_attention" for kind in kinds] or usual


def write_qwen(config: "ModelConfig") -> dict[str, Any]:
    window, kinds = next(filter(None, config.windows), None), layer_types(config)
    first = kinds.index("sliding_attention") if window else config.layers
    return dict(use_sliding_window=bool(window), sliding_window=window, max_window_layers=first, layer_types=kinds)


def layer_types(config: "ModelConfig") -> list[str]:
    return ["sliding_attention" if config.window(layer) else "full_attention" for layer in range(config.layers)]


def read_qwen3(given: Mapping[str, Any], fields: Fields) -> Fields:
    return read_qwen(given, fields) | read_llama(given, fields)


def write_qwen3(config: "ModelConfig") -> dict[str, Any]:
    return write_qwen(config) | write_llama(config)


def read_qwen3_moe(given: Mapping[str, Any], fields: Fields) -> Fields:
    """All layers share a window, and those that `decoder_sparse_step` and `mlp_only_layers` leave out are dense."""
    window = given.get("sliding_window", 4096) if given.get("use_sliding_window") else None
    step, dense = value(given, "decoder_sparse_step", 1), given.get("mlp_only_layers") or []
    return read_llama(given, fields) | dict(
        windows=(window,) * fields["layers"] if window else (),
        dense_layers=tuple(layer for layer in range(fields["layers"]) if layer in dense or (layer + 1) % step),
        experts=value(given, "num_experts", value(given, "num_local_experts", 128)),
    )


def write_qwen3_moe(config: "ModelConfig") -> dict[str, Any]:
    return write_llama(config) | dict(
        use_sliding_window=bool(config.window(0)),
        sliding_window=config.window(0),
        decoder_sparse_step=1,
        mlp_only_layers=list(config.dense_layers),
        num_experts=config.experts,
    )


def read_mixtral(given: Mapping[str, Any], fields: Fields) -> Fields:
    return read_mistral({"sliding_window": None, **given}, fields) | dict(
        expert_intermediate=fields["intermediate"], normalise=True
    )


def read_deepseek(given: Mapping[str, Any], fields: Fields) -> Fields:
    if given.get("attention_bias"):
        raise ConfigError("attention_bias must be false: DeepSeek's projections into latents have none here")
    if given.get("num_key_value_heads") not in (None, fields["heads"]):
        raise ConfigError(
            "num_key_value_heads must equal num_attention_heads: every head has keys and values of its own"
        )
    if given.get("norm_topk_prob"):
        raise ConfigError("norm_topk_prob must be false for DeepSeek-V2: transformers does not normalise there either")
    for key, only in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if value(given, key, only) != only:
            raise ConfigError(f"{key} must be {only} for DeepSeek-V2, not {shown(given[key])}")
    method = value(given, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method must be greedy or group_limited_greedy, not {shown(method)}")
    grouped = method == "group_limited_greedy"
    if grouped and None in (given.get("n_group"), given.get("topk_group")):
        raise ConfigError("group_limited_greedy needs n_group and topk_group")
    return dict(
        kv_heads=fields["heads"],
        head_dim=fields["nope_dim"] + fields["rope_dim"],
        dense_layers=tuple(range(min(value(given, "first_k_dense_replace", 0), fields["layers"]))),
        shared_intermediate=fields["expert_intermediate"] * value(given, "n_shared_experts", 2),
        groups=given["n_group"] if grouped else 1,
        top_groups=given["topk_group"] if grouped else 1,
        q_rank=given.get("q_lora_rank", 1536) or 0,
        normalise=False,
    )


def write_deepseek(config: "ModelConfig") -> dict[str, Any]:
    return dict(
        num_key_value_heads=config.heads,
        head_dim=config.rope_dim,
        attention_bias=False,
        norm_topk_prob=False,
        first_k_dense_replace=len(config.dense_layers),
        n_shared_experts=config.shared_intermediate // config.expert_intermediate,
        q_lora_rank=config.q_rank or None,
        topk_method="group_limited_greedy" if config.groups > 1 else "greedy",
        n_group=config.groups if config.groups > 1 else None,
        topk_group=config.top_groups if config.groups > 1 else None,
    )


def read_gemma2(given: Mapping[str, Any], fields: Fields) -> Fields:
    return read_gemma({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **given}, fields, pattern=2)


def read_gemma3(given: Mapping[str, Any], fields: Fields) -> Fields:
    if given.get("attn_logit_softcapping") is not None:
        raise ConfigError("attn_logit_softcapping must be null for Gemma 3: transformers does not use it there either")
    return read_gemma(given, fields, pattern=value(given, "sliding_window_pattern", 6))


def read_gemma(given: Mapping[str, Any], fields: Fields, pattern: int) -> Fields:
    """Of every `pattern` layers the last sees everything and the others have a window, unless `layer_types` differs."""
    if given.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention must be false: a decoder looks back alone")
    window = given.get("sliding_window", 4096) or None
    slides = sliding_layers(given, [bool((layer + 1) % pattern) for layer in range(fields["layers"])])
    return read_llama(given, fields) | dict(
        windows=tuple(window if slide else None for slide in slides) if window and any(slides) else (),
        embedding_scale=fields["hidden"] ** 0.5,
        attention_scale=value(given, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=given.get("attn_logit_softcapping"),
        logit_softcap=given.get("final_logit_softcapping"),
    )


def write_gemma(config: "ModelConfig") -> dict[str, Any]:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    return write_llama(config) | dict(
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        sliding_window=next(filter(None, config.windows), 4096),  # transformers wants one even where none is used
        layer_types=layer_types(config),
        attn_logit_softcapping=config.attention_softcap,
        final_logit_softcapping=config.logit_softcap,
    )


def read_phi3(given: Mapping[str, Any], fields: Fields) -> Fields:
    if fields["rope_scaling"] and fields["rope_scaling"]["rope_type"] != "longrope":
        raise ConfigError("rope_type must be default or longrope for Phi-3")
    return read_mistral({"sliding_window": None, **given}, fields)


def write_phi3(config: "ModelConfig") -> dict[str, Any]:
    trained = (config.rope_scaling or {}).get("original_max_position_embeddings", config.positions)
    return write_mistral(config) | dict(original_max_position_embeddings=trained)


def read_glm(given: Mapping[str, Any], fields: Fields) -> Fields:
    return dict(qkv_bias=value(given, "attention_bias", True))
