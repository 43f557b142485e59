"""A configuration as the metadata of a GGUF file: the other way of gguf_config, by the same tables.

What is written is read again before a byte of it is in a file: a configuration that would come back as another one, as GGUF
or llama.cpp has no words for it, is refused by the names of what would be lost.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilestack.models import gguf_config as keys
from tilestack.models.config import ModelConfig
from tilestack.models.keys import ConfigError
from tilestack.ops.rope import frequencies

Metadata = dict[str, Any]

ARCHITECTURES = {family: architecture for architecture, family in keys.MODEL_TYPES.items()} | {
    "mistral": "llama",
    "mixtral": "llama",
}
NARROW = ("qwen2", "phi3", "olmo2")  # architectures whose heads together are as wide as the hidden state
OUTPUT_BIAS = ("llama", "granite")  # that may have biases behind attention and in the feed-forward
HAS_HEAD = ("olmo2",)  # that want a head of its own, tied or not
OF_TABLE, OF_FACTORS = ("llama", "granite"), ("llama", "granite", "phi3")  # that take RoPE's tensors
# What a model computes does not depend on these, or they come with the tokenizer.
FREE = ("family", "initial_std", "bos", "eos", "pad", "rope_scaling", "windows")


class Stored(NamedTuple):
    """A tensor as GGUF has it: its shape begins with the length of a row."""

    shape: tuple[int, ...]


def architecture_of(config: ModelConfig) -> str:
    if config.family not in ARCHITECTURES:
        raise ConfigError(f"GGUF files are written of {', '.join(ARCHITECTURES)}, not of {config.family}")
    return ARCHITECTURES[config.family]


def metadata_of(config: ModelConfig) -> Metadata:
    """Everything but the tokenizer. Whole numbers, fractions, texts and lists are what GGUF has under these names."""
    architecture, described = architecture_of(config), config.to_hf()
    said: Metadata = {key: int(described[name]) for name, key in keys.SIZES.items()}
    said |= {
        "vocab_size": config.vocabulary,
        keys.KV_HEADS: config.kv_heads,
        keys.HEAD_DIM: config.head_dim,
        keys.HEAD_DIM.replace("key", "value"): config.head_dim,
        keys.EPS: float(config.norm_eps),
        keys.BASE: float(config.rope_base),
        keys.TURNED: config.rotary_dim,
        **{key: described.get(name) for name, key in keys.SOFT_CAPS.items()},
        **scaling_in_words(config),
        **windows_in_words(config, architecture),
    }
    if architecture == "granite":
        said |= {key: float(described[name]) for name, key in keys.MULTIPLIERS.items()}
    if config.experts:
        said |= {keys.EXPERTS: config.experts, keys.EXPERTS_USED: config.top_k}
        said |= {keys.EXPERT_SIZE: config.expert_intermediate} if architecture != "llama" else {}
    given = {f"{architecture}.{key}": value for key, value in said.items() if value is not None}
    ids = {keys.SPECIAL_IDS["bos_token_id"]: config.bos, keys.SPECIAL_IDS["pad_token_id"]: config.pad}
    given |= {f"{keys.TOKENIZER}.{key}": number for key, number in ids.items() if number is not None and number >= 0}
    return {"general.architecture": architecture} | given


def ends_of_config(config: ModelConfig) -> Metadata:
    """The tokens that end a text, for a file whose tokenizer names none. There is a place for three."""
    ends = list(dict.fromkeys(number for number in config.eos if number >= 0))
    if len(ends) > len(keys.ENDS):
        raise ConfigError(
            f"a GGUF file has places for {len(keys.ENDS)} tokens that end a text ({', '.join(keys.ENDS)}), and this model "
            f"ends at {len(ends)}: {', '.join(map(str, ends))}. Give the tokenizer, of whose tokens llama.cpp knows some "
            "as ends by their texts, or a configuration with fewer in `eos`"
        )
    return {f"{keys.TOKENIZER}.{key}": number for key, number in zip(keys.ENDS, ends, strict=False)}


def scaling_in_words(config: ModelConfig) -> Metadata:
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "llama3":
        return {}  # a table of factors says it
    kind = scaling["rope_type"]
    if kind not in ("linear", "yarn", "longrope"):
        raise ConfigError(f"GGUF has no words for rope scaling of the type {kind}")
    said: Metadata = {keys.SCALING: kind}
    if kind == "longrope":
        said[keys.SCORE_FACTOR] = turning(config)[1]
    else:
        said[keys.FACTOR] = float(scaling["factor"])
    if trained := scaling.get("original_max_position_embeddings"):
        said[keys.TRAINED] = trained
    return said


def windows_in_words(config: ModelConfig, architecture: str) -> Metadata:
    """How far layers look back. The architectures of llama.cpp that have windows have them by a period of layers, which for
    Gemma 2 is two."""
    windows = windows_of(config)
    size = next(filter(None, windows), None)
    if architecture == "phi3":
        return {keys.WINDOW: size or 0}
    if architecture not in ("gemma2", "gemma3") or size is None:
        return {}
    periods = range(1, config.layers + 2)
    fitting = [p for p in periods if all(bool((layer + 1) % p) == bool(w) for layer, w in enumerate(windows))]
    if not fitting:
        raise ConfigError("GGUF has no words for windows in these layers: they follow no period")
    period = {keys.PATTERN: fitting[0]} if architecture == "gemma3" else {}
    return {keys.WINDOW: size, keys.LOCAL_BASE: config.local_rope_base} | period


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """Of every layer; one as long as the longest text is none."""
    windows = (config.window(layer) for layer in range(config.layers))
    return tuple(None if size is None or size >= config.positions else size for size in windows)


def turning(config: ModelConfig, long: bool = False) -> tuple[Tensor, float]:
    """What RoPE makes of short texts or of long ones."""
    scaling = config.rope_scaling and {"max_position_embeddings": config.positions} | config.rope_scaling
    return frequencies(config.rotary_dim, config.rope_base, scaling, config.positions if long else None)


def rope_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """What frequencies are divided by, where that is not one number."""
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "longrope":
        factors = (scaling["short_factor"], scaling["long_factor"])
        return {
            name: torch.tensor(some, dtype=torch.float32) for name, some in zip(keys.ROPE_FACTORS, factors, strict=True)
        }
    if scaling["rope_type"] == "llama3":
        plain, _ = frequencies(config.rotary_dim, config.rope_base)
        return {keys.ROPE_TABLE: plain / turning(config)[0]}
    return {}


def refuse_what_is_lost(config: ModelConfig, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless what a file says, with tensors of these shapes, is the configuration."""
    architecture = metadata["general.architecture"]
    stored = {name: Stored(tuple(reversed(shape))) for name, shape in shapes.items()}
    read = keys.config_of(metadata, stored, rope_tensors(config))
    changed = [each.name for each in dataclasses.fields(config) if each.name not in FREE]
    lost = [name for name in changed if not same(getattr(config, name), getattr(read, name))]
    if architecture in HAS_HEAD and lost == ["tied"]:
        lost = []
    lost += ["windows"] * (windows_of(config) != windows_of(read))
    lost += ["rope_scaling"] * (not same_turning(config, read))
    lost += refused_by_llama_cpp(config, architecture)
    if lost:
        raise ConfigError(
            f"GGUF has no words for this of a {config.family} model (architecture {architecture}): {', '.join(lost)}"
        )


def refused_by_llama_cpp(config: ModelConfig, architecture: str) -> list[str]:
    """What tilestack would read again, and llama.cpp would not."""
    tensors = rope_tensors(config)
    return [
        *["head_dim"] * (architecture in NARROW and config.heads * config.head_dim != config.hidden),
        *["output_bias"] * (config.output_bias and architecture not in OUTPUT_BIAS),
        *["mlp_bias"] * (config.mlp_bias and architecture not in OUTPUT_BIAS),
        *["tied"] * (architecture == "gemma2" and not config.tied),
        *["rope_scaling"] * (keys.ROPE_TABLE in tensors and architecture not in OF_TABLE),
        *["rope_scaling"] * (keys.ROPE_FACTORS[0] in tensors and architecture not in OF_FACTORS),
        *["dense_layers"] * bool(config.dense_layers),
    ]


def same(ours: Any, read: Any) -> bool:
    """Whether a value is as it was; numbers are float32 in the file."""
    if isinstance(ours, int | float) and isinstance(read, int | float):
        return bool(np.float32(ours) == np.float32(read))
    return ours == read


def same_turning(config: ModelConfig, read: ModelConfig) -> bool:
    if (config.rope_scaling is None) != (read.rope_scaling is None):
        return False
    for long in (False, True):
        (ours, score), (theirs, other) = turning(config, long), turning(read, long)
        if not torch.allclose(ours, theirs, rtol=1e-5) or abs(score - other) > 1e-5:
            return False
    return True
