"""A tiny model of every family, as a Hugging Face configuration: two or three layers, awkward in what it combines."""

import copy
from pathlib import Path
from typing import Any

import torch

from tilestack import models

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    eos_token_id=2,
    pad_token_id=None,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=8
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": dict(model_type="llama", num_key_value_heads=4),
    "llama3": dict(model_type="llama", rope_theta=500000.0, rope_scaling=LLAMA3),
    "smollm2": dict(model_type="llama", tie_word_embeddings=True, eos_token_id=[2, 3], rms_norm_eps=1e-5),
    "llama_biased": dict(model_type="llama", attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_linear": dict(model_type="llama", rope_scaling=dict(rope_type="linear", factor=2.0)),
    "llama_dynamic": dict(
        model_type="llama", max_position_embeddings=16, rope_scaling=dict(rope_type="dynamic", factor=2.0)
    ),
    "mistral": dict(model_type="mistral", sliding_window=5),
    "mistral_whole": dict(model_type="mistral", sliding_window=None, head_dim=32),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2_window": dict(model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": dict(model_type="qwen3", head_dim=24, rope_theta=1000000.0),
    "qwen3_yarn": dict(model_type="qwen3", head_dim=16, rope_scaling=YARN),
    "qwen3_moe": dict(
        model_type="qwen3_moe", head_dim=16, num_experts=8, norm_topk_prob=True, mlp_only_layers=[0], **EXPERTS
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    "deepseek_v2": dict(
        model_type="deepseek_v2", q_lora_rank=20, n_shared_experts=2, first_k_dense_replace=1, **EXPERTS, **LATENT
    ),
    "deepseek_v2_lite": dict(
        model_type="deepseek_v2",
        q_lora_rank=None,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_scaling=YARN,
        **EXPERTS,
        **LATENT,
    ),
}

GEMMA = dict(hidden_activation="gelu_pytorch_tanh", head_dim=24, query_pre_attn_scalar=20, sliding_window=5)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.2, 1.5, 1.7, 2.0],
    long_factor=[1.0, 1.5, 2.5, 4.0, 8.0, 9.0],
    original_max_position_embeddings=32,
)
FAMILIES |= {
    "gemma2": dict(
        model_type="gemma2",
        num_hidden_layers=4,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        tie_word_embeddings=True,
        **GEMMA,
    ),
    "gemma3": dict(model_type="gemma3_text", num_hidden_layers=4, sliding_window_pattern=3, rope_theta=3e4, **GEMMA),
    "gemma3_whole": dict(model_type="gemma3_text", layer_types=["full_attention"] * 2, **GEMMA),
    "gemma3_scaled": dict(
        model_type="gemma3_text",
        layer_types=["full_attention", "sliding_attention"],
        rope_scaling=dict(rope_type="linear", factor=8.0),
        rope_local_base_freq=500.0,
        attention_bias=True,
        tie_word_embeddings=False,
        final_logit_softcapping=5.0,
        **GEMMA,
    ),
    "phi3": dict(model_type="phi3", sliding_window=5),
    "phi4_mini": dict(
        model_type="phi3",
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
    "phi4_mini_long": dict(
        model_type="phi3",
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE | dict(original_max_position_embeddings=16),
        original_max_position_embeddings=16,
    ),
    "olmo2": dict(model_type="olmo2", attention_bias=True),
    "granite": dict(
        model_type="granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.17,
        logits_scaling=3.0,
        mlp_bias=True,
    ),
    "glm": dict(model_type="glm", head_dim=16),
    "glm4": dict(model_type="glm4", head_dim=24, partial_rotary_factor=0.5, attention_bias=True),
}


def config_of(family: str) -> dict[str, Any]:
    return copy.deepcopy(SIZES | FAMILIES[family])  # transformers writes into what it is given


def theirs(family: str) -> torch.nn.Module:
    """transformers' model of a family, with weights that are large enough to tell layouts apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    described = dict(config_of(family))
    torch.manual_seed(0)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.normal_(1.0 if "norm" in name and parameter.ndim == 1 else 0.0, scale)
    return model


def ids(batch: int = 2, tokens: int = 24) -> torch.Tensor:
    return torch.randint(97, (batch, tokens), generator=torch.Generator().manual_seed(1))


def ours(family: str, **changes: Any) -> models.Decoder:
    """Our model of a family, with weights large enough to matter."""
    torch.manual_seed(0)
    decoder = models.Decoder(models.ModelConfig.from_hf(config_of(family) | changes)).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return decoder


def write_gguf(path: Path, **changes: Any) -> None:
    """A llama of one layer as a GGUF file; `changes` are of its metadata alone."""
    import gguf

    said = dict(context_length=64, embedding_length=32, block_count=1, feed_forward_length=64, head_count=2)
    said |= dict(head_count_kv=1, eps=1e-5)
    said |= changes
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(said["context_length"])
    writer.add_embedding_length(said["embedding_length"])
    writer.add_block_count(said["block_count"])
    writer.add_feed_forward_length(said["feed_forward_length"])
    writer.add_head_count(said["head_count"])
    writer.add_head_count_kv(said["head_count_kv"])
    writer.add_layer_norm_rms_eps(said["eps"])
    numbers = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (50, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
    }
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=numbers).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
