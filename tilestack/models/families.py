"""The families of decoders, as Hugging Face names them: what their config.json calls each field, and what it implies.

A family is an entry of `FAMILIES`. What it has beyond one key for one field is in `family_settings`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilestack.models import family_settings as settings
from tilestack.models.family_settings import Fields

if TYPE_CHECKING:
    from tilestack.models.config import ModelConfig

REQUIRED = ("vocabulary", "hidden", "intermediate", "layers", "heads")
KEYS = dict(
    vocabulary="vocab_size",
    hidden="hidden_size",
    intermediate="intermediate_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    head_dim="head_dim",
    positions="max_position_embeddings",
    norm_eps="rms_norm_eps",
    tied="tie_word_embeddings",
    initial_std="initializer_range",
    bos="bos_token_id",
    pad="pad_token_id",
)
COMMON_KEYS = {
    "model_type", "architectures", "hidden_act", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "dtype", "torch_dtype", "use_cache", "attention_dropout", "pretraining_tp",
    "transformers_version", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
NORMS = dict(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")


@dataclass(frozen=True)
class Tensors:
    """What a family calls the tensors of a layer, where families differ.

    `norms` by our names; `fused` names those of our fused projections that it stores as one tensor too.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    fused: frozenset[str] = frozenset()
    experts_block: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One model_type: `keys` by field, defaults of its own, and `read`/`write` for what is not one key for one field."""

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any], Fields], Fields] = lambda given, fields: {}
    write: Callable[["ModelConfig"], dict[str, Any]] = lambda config: {}
    other_keys: frozenset[str] = frozenset()
    tensors: Tensors = field(default_factory=Tensors)


ATTENTION = frozenset({"attention_bias"})
WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
EXPERTS = dict(top_k="num_experts_per_tok")
PARTIAL = dict(rotary_factor="partial_rotary_factor")
GEMMA = frozenset(
    {"hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    | {"use_bidirectional_attention", "cache_implementation", "sliding_window_pattern", "_sliding_window_pattern"}
)
GEMMA_DEFAULTS = dict(
    kv_heads=4, head_dim=256, tied=True, activation="gelu_tanh", norm_offset=1.0, post_norms=True, positions=8192
)
GEMMA_TENSORS = Tensors(
    dict(
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
)
GLM_DEFAULTS = dict(
    kv_heads=2, head_dim=128, positions=131072, norm_eps=1.5625e-07, rotary_factor=0.5, rotary_interleaved=True
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        KEYS | {"mlp_bias": "mlp_bias"},
        {},
        settings.read_llama,
        settings.write_llama,
        other_keys=ATTENTION,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        KEYS,
        dict(positions=131072),
        settings.read_mistral,
        settings.write_mistral,
        other_keys=WINDOW,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", KEYS, dict(positions=32768), settings.read_qwen, settings.write_qwen, other_keys=WINDOW
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        KEYS,
        dict(positions=32768, head_dim=128, qk_norm="head"),
        settings.read_qwen3,
        settings.write_qwen3,
        other_keys=ATTENTION | WINDOW,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        KEYS | EXPERTS | {"expert_intermediate": "moe_intermediate_size", "normalise": "norm_topk_prob"},
        dict(positions=32768, qk_norm="head", normalise=False, top_k=8, expert_intermediate=768),
        settings.read_qwen3_moe,
        settings.write_qwen3_moe,
        other_keys=ATTENTION | WINDOW | {"num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        KEYS | EXPERTS | {"experts": "num_local_experts"},
        dict(positions=131072, norm_eps=1e-5, rope_base=1e6, experts=8, top_k=2),
        settings.read_mixtral,
        settings.write_mistral,
        other_keys=WINDOW | {"router_jitter_noise"},
        tensors=Tensors(experts_block="block_sparse_moe", expert=("w1", "w3", "w2")),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        KEYS
        | EXPERTS
        | {
            "experts": "n_routed_experts",
            "expert_intermediate": "moe_intermediate_size",
            "expert_scale": "routed_scaling_factor",
            "kv_rank": "kv_lora_rank",
            "nope_dim": "qk_nope_head_dim",
            "rope_dim": "qk_rope_head_dim",
            "value_dim": "v_head_dim",
        },
        dict(experts=64, top_k=6, expert_intermediate=1407, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        settings.read_deepseek,
        settings.write_deepseek,
        other_keys=ATTENTION
        | {"q_lora_rank", "topk_method", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"}
        | {"norm_topk_prob", "qk_head_dim", "moe_layer_freq", "scoring_func", "aux_loss_alpha", "seq_aux"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        KEYS,
        GEMMA_DEFAULTS,
        settings.read_gemma2,
        settings.write_gemma,
        other_keys=ATTENTION | WINDOW | GEMMA,
        tensors=GEMMA_TENSORS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        KEYS | {"local_rope_base": "rope_local_base_freq"},
        GEMMA_DEFAULTS | dict(positions=131072, qk_norm="head", rope_base=1e6, local_rope_base=1e4),
        settings.read_gemma3,
        settings.write_gemma,
        other_keys=ATTENTION | WINDOW | GEMMA,
        tensors=GEMMA_TENSORS,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        KEYS | PARTIAL,
        dict(positions=4096, norm_eps=1e-5),
        settings.read_phi3,
        settings.write_phi3,
        other_keys=WINDOW | {"original_max_position_embeddings", "resid_pdrop", "embd_pdrop", "attention_bias"},
        tensors=Tensors(fused=frozenset({"qkv", "gate_up"})),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        KEYS,
        dict(norm_eps=1e-5, qk_norm="projection", pre_norms=False, post_norms=True),
        settings.read_llama,
        settings.write_llama,
        other_keys=ATTENTION,
        tensors=Tensors(
            dict(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
        ),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        KEYS
        | {
            "mlp_bias": "mlp_bias",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
            "logit_divisor": "logits_scaling",
        },
        dict(attention_scale=1.0),
        settings.read_llama,
        settings.write_llama,
        other_keys=ATTENTION,
    ),
    "glm": Family(
        "GlmForCausalLM",
        KEYS | PARTIAL,
        GLM_DEFAULTS,
        settings.read_glm,
        settings.write_llama,
        other_keys=ATTENTION,
        tensors=Tensors(fused=frozenset({"gate_up"})),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        KEYS | PARTIAL,
        GLM_DEFAULTS | dict(post_norms=True),
        settings.read_glm,
        settings.write_llama,
        other_keys=ATTENTION,
        tensors=Tensors(
            dict(
                attention_norm="input_layernorm",
                attention_post_norm="post_self_attn_layernorm",
                mlp_norm="post_attention_layernorm",
                mlp_post_norm="post_mlp_layernorm",
            ),
            frozenset({"gate_up"}),
        ),
    ),
}

HINTS = {
    "gemma3": "it reads images too; its text model alone is gemma3_text",
    "phi4_multimodal": "it reads images and sound too; Phi-4 and Phi-4-mini are phi3",
    "phi4mm": "it reads images and sound too; Phi-4 and Phi-4-mini are phi3",
    "glm4_moe": "of the GLM-4 models the dense ones are, glm and glm4",
    "granitemoe": "of the Granite models the dense ones are, granite",
    "granitemoehybrid": "of the Granite models the dense ones are, granite",
    "olmoe": "of the OLMo models the dense OLMo 2 is, olmo2",
}
