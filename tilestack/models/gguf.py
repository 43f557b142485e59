"""GGUF files, llama.cpp's format: one file that holds a model's settings, its tokenizer and its (quantised) tensors."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilestack.extras import MissingExtra, install_command
from tilestack.models.config import ModelConfig
from tilestack.models.families import ConfigError
from tilestack.models.weights import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUF:
    """An open file: `metadata` by key, `tensors` by name, dequantised to float32 when they are looked up.

    As a source of weights it goes by Hugging Face's names and has the llama architecture's queries and keys in
    Hugging Face's order.
    """

    def __init__(self, path: str | Path):
        try:
            self.reader = reader_of(Path(path))
        except ImportError as missing:
            raise MissingExtra(f"reading GGUF files needs gguf: {install_command('formats')}") from missing
        except (ValueError, OSError, LookupError, OverflowError) as problem:
            raise CheckpointError(f"{path} cannot be read as GGUF: {problem}") from problem
        self.stored = {tensor.name: tensor for tensor in self.reader.tensors}

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return {key: field.contents() for key, field in self.reader.fields.items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return Dequantised(self.stored)

    @cached_property
    def config(self) -> ModelConfig:
        return config_of(self.metadata, self.stored)

    @cached_property
    def by_hf_name(self) -> dict[str, str]:
        return {hf_name(name): name for name in self.stored}

    def names(self) -> Iterable[str]:
        return self.by_hf_name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.stored[self.by_hf_name[name]].shape))

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[self.by_hf_name[name]]
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2])
        return halves(tensor, heads) if heads and self.metadata["general.architecture"] == "llama" else tensor


def reader_of(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Reads the file through a plain array: slices of a memmap took three quarters of the time to open one."""

        @property
        def data(self):
            return self.plain

        @data.setter
        def data(self, mapped):
            self.plain = np.asarray(mapped)

    return Reader(path)


class Dequantised(Mapping[str, Tensor]):
    def __init__(self, stored: Mapping[str, Any]):
        self.stored = stored

    def __getitem__(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self.stored[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head in RoPE's two halves, as ours, where llama.cpp keeps the two elements of a pair together."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES.get(part, part)}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"


def config_of(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a file's metadata describes."""
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ConfigError(f"GGUF files of {', '.join(ARCHITECTURES)} are read, not of {family!r}")
    if "rope_freqs.weight" in tensors:
        raise ConfigError("the GGUF file scales RoPE by a table, rope_freqs.weight; load the model's original folder")
    if f"{family}.expert_count" in metadata:
        raise ConfigError(f"the GGUF file is a mixture of experts ({family}.expert_count); load its original folder")

    def of(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {family}.{key}")
        return value

    hidden, heads, tokenizer = of("embedding_length"), of("attention.head_count"), "tokenizer.ggml"
    described = {
        "model_type": family,
        "vocab_size": int(tensors["token_embd.weight"].shape[1])
        if "token_embd.weight" in tensors
        else of("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("attention.key_length", hidden // heads),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": round(float(of("attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": of("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get(f"{tokenizer}.bos_token_id"),
        "eos_token_id": metadata.get(f"{tokenizer}.eos_token_id"),
        "pad_token_id": metadata.get(f"{tokenizer}.padding_token_id"),
    }
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind != "none":
        trained = metadata.get(f"{family}.rope.scaling.original_context_length", of("context_length"))
        described["rope_scaling"] = {
            "rope_type": kind, "factor": of("rope.scaling.factor"), "original_max_position_embeddings": trained
        }  # fmt: skip
    return ModelConfig.from_hf(described)
