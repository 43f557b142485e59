"""The configuration that the metadata of a GGUF file describes, put into the words of a config.json.

llama.cpp calls families and their settings by names of its own, leaves out what it has in its code, and keeps some
settings in tensors.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.models.keys import ConfigError, shown

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm4": "glm4",
}
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
TOKENIZER = "tokenizer.ggml"


class Settings:
    """An architecture's part of the metadata. Numbers are float32 in the file: 0.22 comes as 0.2199999988, and is 0.22."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata, self.architecture = metadata, metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        """What the file says, or None."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def config_of(metadata: Mapping[str, Any], stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    """From a file's metadata, its tensors as they are `stored`, and dequantised when one looks at them."""
    of, embedding = Settings(metadata), stored.get("token_embd.weight")
    if of.architecture not in MODEL_TYPES:
        raise ConfigError(f"GGUF files of {', '.join(MODEL_TYPES)} are read, not of {shown(of.architecture)}")
    if "rope_freqs.weight" in stored:
        raise ConfigError("the GGUF file scales RoPE by a table, rope_freqs.weight; load the model's original folder")
    if of.get("expert_count"):
        raise ConfigError(
            f"the GGUF file is a mixture of {shown(of.get('expert_count'))} experts; load its original folder"
        )
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("the GGUF file lacks token_embd.weight, a row of numbers for each token")
    described = {
        "model_type": MODEL_TYPES[of.architecture],
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": of.need("embedding_length"),
        "intermediate_size": of.need("feed_forward_length"),
        "num_hidden_layers": of.need("block_count"),
        "num_attention_heads": of.need("attention.head_count"),
        "num_key_value_heads": of.get("attention.head_count_kv") or of.need("attention.head_count"),
        "head_dim": head_dim_of(of),
        "max_position_embeddings": of.need("context_length"),
        "rms_norm_eps": of.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": of.get("rope.freq_base") or 10000.0,
        "partial_rotary_factor": rotary_factor_of(of),
        "rope_scaling": scaling_of(of, tensors),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "bos_token_id": metadata.get(f"{TOKENIZER}.bos_token_id"),
        "eos_token_id": metadata.get(f"{TOKENIZER}.eos_token_id"),
        "pad_token_id": metadata.get(f"{TOKENIZER}.padding_token_id"),
        **OWN_SETTINGS.get(of.architecture, lambda of: {})(of),
    }
    return ModelConfig.from_hf({key: value for key, value in described.items() if value is not None})


def head_dim_of(of: Settings) -> Any:
    hidden, heads = of.need("embedding_length"), of.need("attention.head_count")
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    return of.get("attention.key_length") or (hidden // heads if whole else None)


def rotary_factor_of(of: Settings) -> float | None:
    """The share of a head that is turned; not a rounding error less, as what it makes of the head is rounded down."""
    turned, head_dim = of.get("rope.dimension_count"), head_dim_of(of)
    if not isinstance(turned, int) or not isinstance(head_dim, int) or head_dim < 1:
        return None
    factor = turned / head_dim
    return factor if int(head_dim * factor) >= turned else math.nextafter(factor, 1.0)


def scaling_of(of: Settings, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """How RoPE is stretched: by a factor of the metadata, or by two tensors of factors (longrope)."""
    trained = of.get("rope.scaling.original_context_length") or of.need("context_length")
    if all(name in tensors for name in ROPE_FACTORS):
        short, long = (tensors[name].flatten().tolist() for name in ROPE_FACTORS)
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": trained,
            "attention_factor": of.get("rope.scaling.attn_factor"),
        }
    kind = of.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": of.need("rope.scaling.factor"), "original_max_position_embeddings": trained}


def gemma(of: Settings, largest: int) -> dict[str, Any]:
    """Scores are scaled by a head's size, in the largest model (which llama.cpp knows by its layers) by hidden / heads."""
    hidden, heads = of.need("embedding_length"), of.need("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {}  # refused where sizes are checked
    scalar = hidden // heads if of.need("block_count") == largest else head_dim_of(of)
    return {
        "sliding_window": of.get("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": of.get("attn_logit_softcapping"),
        "final_logit_softcapping": of.get("final_logit_softcapping"),
    }


def gemma3(of: Settings) -> dict[str, Any]:
    pattern = of.get("attention.sliding_window_pattern")
    by_layer = {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern or ()] or None
    }
    given = by_layer if isinstance(pattern, list) else {"sliding_window_pattern": pattern}
    return gemma(of, largest=62) | {"rope_local_base_freq": of.get("rope.freq_base_swa")} | given


def phi3(of: Settings) -> dict[str, Any]:
    """Phi-4 is written with a window of 0, which is none."""
    return {"sliding_window": of.get("attention.sliding_window") or None}


def granite(of: Settings) -> dict[str, Any]:
    return {
        "embedding_multiplier": of.get("embedding_scale"),
        "residual_multiplier": of.get("residual_scale"),
        "attention_multiplier": of.get("attention.scale"),
        "logits_scaling": of.get("logit_scale"),
    }


OWN_SETTINGS = {"gemma2": lambda of: gemma(of, largest=46), "gemma3": gemma3, "phi3": phi3, "granite": granite}
