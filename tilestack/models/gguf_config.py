"""The configuration that the metadata of a GGUF file describes, put into the words of a config.json.

llama.cpp calls families and their settings by names of its own, leaves out what it has in its code, and keeps some
settings in tensors.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.models.keys import ConfigError, shown
from tilestack.ops.rope import llama3

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
    "qwen3moe": "qwen3_moe",
}
MIXTURES = ("llama", "qwen3moe")  # architectures that may have experts
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_TABLE = "rope_freqs.weight"
ROPE_TENSORS = (*ROPE_FACTORS, ROPE_TABLE)
TOKENIZER = "tokenizer.ggml"
# llama.cpp's keys by those of a config.json, where one is the other. Files are written by these tables too.
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
SPECIAL_IDS = dict(bos_token_id="bos_token_id", eos_token_id="eos_token_id", pad_token_id="padding_token_id")
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, and of a message that waits for a tool
SOFT_CAPS = dict(attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping")
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
EPS, BASE, LOCAL_BASE = "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa"
KV_HEADS, HEAD_DIM, TURNED = "attention.head_count_kv", "attention.key_length", "rope.dimension_count"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SCALING, FACTOR, SCORE_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"
TRAINED, OLD_FACTOR = "rope.scaling.original_context_length", "rope.scale_linear"
YARN_RAMP = dict(beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow")
# What multiplies cosines and sines beside what the kind of scaling does, where it is not 1.
SCORE_FACTORS = (SCORE_FACTOR, "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor")
EXPERTS, EXPERTS_USED, EXPERT_SIZE = "expert_count", "expert_used_count", "expert_feed_forward_length"


class Settings:
    """An architecture's part of the metadata. Numbers are float32 in the file: 0.22 comes as 0.2199999988, and is 0.22."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata, self.architecture = metadata, metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        """What the file says, or None."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return as_written(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def as_written(value: float) -> float:
    """A number of float32 as a person would have written it."""
    return float(str(np.float32(value)))


def config_of(metadata: Mapping[str, Any], stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    """From a file's metadata, its tensors as they are `stored`, and dequantised when one looks at them."""
    of, embedding = Settings(metadata), stored.get("token_embd.weight")
    if of.architecture not in MODEL_TYPES:
        raise ConfigError(f"GGUF files of {', '.join(MODEL_TYPES)} are read, not of {shown(of.architecture)}")
    if of.get(EXPERTS) and of.architecture not in MIXTURES:
        raise ConfigError(f"GGUF files of mixtures are read of {' and '.join(MIXTURES)}, not of {of.architecture}")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("the GGUF file lacks token_embd.weight, a row of numbers for each token")
    described = {
        "model_type": MODEL_TYPES[of.architecture],
        "vocab_size": int(embedding.shape[1]),
        **{name: of.need(key) for name, key in SIZES.items()},
        "num_key_value_heads": of.get(KV_HEADS) or of.need(SIZES["num_attention_heads"]),
        "head_dim": head_dim_of(of),
        "rms_norm_eps": of.need(EPS),
        "rope_theta": of.get(BASE) or 10000.0,
        "partial_rotary_factor": rotary_factor_of(of),
        "rope_scaling": scaling_of(of, tensors),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_down.bias" in stored or None,
        **{name: metadata.get(f"{TOKENIZER}.{key}") for name, key in SPECIAL_IDS.items()},
        "eos_token_id": ends_of(metadata),
        **OWN_SETTINGS.get(of.architecture, lambda of: {})(of),
    }
    return ModelConfig.from_hf({key: value for key, value in described.items() if value is not None})


def ends_of(metadata: Mapping[str, Any]) -> Any:
    """The tokens that end what a model says, its text's first; llama.cpp stops at any of them."""
    found: list[Any] = []
    for key in ENDS:
        number = metadata.get(f"{TOKENIZER}.{key}")
        found += [number] * (number is not None and number not in found)
    return found[0] if len(found) == 1 else found or None


def head_dim_of(of: Settings) -> Any:
    hidden, heads = of.need("embedding_length"), of.need("attention.head_count")
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    return of.get(HEAD_DIM) or (hidden // heads if whole else None)


def rotary_factor_of(of: Settings) -> float | None:
    """The share of a head that is turned; not a rounding error less, as what it makes of the head is rounded down."""
    turned, head_dim = of.get(TURNED), head_dim_of(of)
    if not isinstance(turned, int) or not isinstance(head_dim, int) or head_dim < 1:
        return None
    factor = turned / head_dim
    return factor if int(head_dim * factor) >= turned else math.nextafter(factor, 1.0)


def scaling_of(of: Settings, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """How RoPE is stretched: by a factor of the metadata, by two tensors of factors (longrope), or by one (llama3)."""
    trained = of.get(TRAINED) or of.need("context_length")
    if all(name in tensors for name in ROPE_FACTORS):
        short, long = (tensors[name] for name in ROPE_FACTORS)
        return longrope(short, long, trained, of.get(SCORE_FACTOR))
    if other := [key for key in SCORE_FACTORS if of.get(key) not in (None, 1)]:
        raise ConfigError(
            f"{of.architecture}.{other[0]} is {shown(of.get(other[0]))}; other factors than 1 are not read"
        )
    if ROPE_TABLE in tensors:
        table = tensors[ROPE_TABLE]
        return llama3_of(table, of) or longrope(table, table, trained, 1.0)
    # To llama.cpp a file that names a factor and no kind of scaling is one of linear scaling, and older files call it otherwise.
    kind, factor = of.get(SCALING) or "linear", of.get(FACTOR) or of.get(OLD_FACTOR)
    if kind == "none" or (kind == "linear" and not factor):
        return None
    ramp = {name: of.get(key) for name, key in YARN_RAMP.items()} if kind == "yarn" else {}
    return {
        "rope_type": kind,
        "factor": factor or of.need(FACTOR),
        "original_max_position_embeddings": trained,
        **{name: value for name, value in ramp.items() if value is not None},
    }


def longrope(short: Tensor, long: Tensor, trained: Any, score_factor: float | None) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short.flatten().tolist(),
        "long_factor": long.flatten().tolist(),
        "original_max_position_embeddings": trained,
        "attention_factor": score_factor,
    }


def llama3_of(table: Tensor, of: Settings) -> dict[str, Any] | None:
    """What of Llama 3.1's way to stretch RoPE makes a table of factors, where it does: pairs that turn less than once in the
    trained length are divided by the largest, those that turn four times by 1, and one between tells that length."""
    factors, base = table.flatten().double(), of.get(BASE) or 10000.0
    largest = float(factors.max()) if factors.numel() else 1.0
    between = ((factors > 1.001) & (factors < largest / 1.001)).nonzero()
    if not len(between) or not isinstance(base, float) or base <= 1:
        return None
    plain = base ** -(torch.arange(len(factors), dtype=torch.float64) / len(factors))
    first = between[0, 0]
    kept = (1 / factors[first] - 1 / largest) / (1 - 1 / largest)
    found = {"rope_type": "llama3", "factor": as_written(largest), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found["original_max_position_embeddings"] = round(float((3 * kept + 1) * 2 * math.pi / plain[first]))
    return found if torch.allclose(plain / llama3(plain, found), factors, rtol=1e-5) else None


def gemma(of: Settings, largest: int) -> dict[str, Any]:
    """Scores are scaled by a head's size, in the largest model (which llama.cpp knows by its layers) by hidden / heads."""
    hidden, heads = of.need("embedding_length"), of.need("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {}  # refused where sizes are checked
    scalar = hidden // heads if of.need("block_count") == largest else head_dim_of(of)
    return {
        "sliding_window": of.get(WINDOW),
        "query_pre_attn_scalar": scalar,
        **{name: of.get(key) for name, key in SOFT_CAPS.items()},
    }


def gemma3(of: Settings) -> dict[str, Any]:
    """Layers have windows by a period, or each as a list says; without a size of windows none has."""
    pattern = of.get(PATTERN)
    given: dict[str, Any] = {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):
        given = {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern] or None}
    own = {"rope_local_base_freq": of.get(LOCAL_BASE), "sliding_window": of.get(WINDOW) or 0}
    return gemma(of, largest=62) | own | given


def phi3(of: Settings) -> dict[str, Any]:
    """Phi-4 is written with a window of 0, which is none."""
    return {"sliding_window": of.get(WINDOW) or None}


def granite(of: Settings) -> dict[str, Any]:
    return {name: of.get(key) for name, key in MULTIPLIERS.items()}


def llama(of: Settings) -> dict[str, Any]:
    """With experts it is a Mixtral."""
    if not of.get(EXPERTS):
        return {}
    used = of.need(EXPERTS_USED)
    return {"model_type": "mixtral", "num_local_experts": of.get(EXPERTS), "num_experts_per_tok": used}


def qwen3moe(of: Settings) -> dict[str, Any]:
    """llama.cpp always lets the weights of a token's experts add up to one."""
    return {
        "num_experts": of.need(EXPERTS),
        "num_experts_per_tok": of.need(EXPERTS_USED),
        "moe_intermediate_size": of.need(EXPERT_SIZE),
        "norm_topk_prob": True,
    }


OWN_SETTINGS = {
    "llama": llama,
    "qwen3moe": qwen3moe,
    "gemma2": lambda of: gemma(of, largest=46),
    "gemma3": gemma3,
    "phi3": phi3,
    "granite": granite,
}
