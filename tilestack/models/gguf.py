"""GGUF files, llama.cpp's format: one file that holds a model's settings, its tokenizer and its (quantised) tensors."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.extras import MissingExtra, install_command
from tilestack.models.config import ModelConfig
from tilestack.models.families import FAMILIES, Tensors
from tilestack.models.gguf_config import ROPE_TENSORS, config_of
from tilestack.models.gguf_reader import reader_of
from tilestack.models.weights import CheckpointError

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORM_NAMES = {  # ours
    "attn_norm": "attention_norm",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # of all experts, in the order of families' names of them
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PAIRED = ("llama", "granite")  # architectures whose queries and keys llama.cpp keeps in an order of its own


class GGUF:
    """An open file: `metadata` by key, `tensors` by name, dequantised to float32 when they are looked up.

    As a source of weights it goes by Hugging Face's names, has the llama architecture's queries and keys in Hugging
    Face's order, and Gemma's norms without the 1 that llama.cpp adds to them.
    """

    def __init__(self, path: str | Path):
        try:
            self.reader = reader_of(Path(path))
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in self.reader.fields.items()}
        except ImportError as missing:
            raise MissingExtra(f"reading GGUF files needs gguf: {install_command('formats')}") from missing
        except (ValueError, OSError, LookupError, OverflowError, RecursionError, TypeError) as problem:
            raise CheckpointError(f"{path} cannot be read as GGUF: {' '.join(str(problem).split())[:200]}") from problem
        self.stored = {tensor.name: tensor for tensor in self.reader.tensors}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return Dequantised(self.stored)

    @cached_property
    def config(self) -> ModelConfig:
        return config_of(self.metadata, self.stored, self.tensors)

    @cached_property
    def by_hf_name(self) -> dict[str, tuple[str, int | None]]:
        """The stored tensor by Hugging Face's name, and which expert of it, where it is of all experts."""
        tensors, experts = FAMILIES[self.config.family].tensors, self.config.experts
        found: dict[str, tuple[str, int | None]] = {}
        for name in self.stored:
            if name in ROPE_TENSORS:
                continue
            if is_of_experts(name):
                found |= {hf_name(name, tensors, expert): (name, expert) for expert in range(experts)}
            else:
                found[hf_name(name, tensors)] = name, None
        return found

    def names(self) -> Collection[str]:
        return self.by_hf_name

    def shape(self, name: str) -> tuple[int, ...]:
        stored, expert = self.by_hf_name[name]
        shape = tuple(int(size) for size in reversed(self.stored[stored].shape))
        return shape[1:] if expert is not None and shape[0] == self.config.experts else shape

    def dtype(self, name: str) -> str:
        return "F32"  # whatever it is kept in, it is read as this

    def read(self, name: str) -> Tensor:
        stored, expert = self.by_hf_name[name]
        tensor = self.tensors[stored] if expert is None else dequantised(self.stored[stored], expert)
        if name.endswith("norm.weight"):
            return tensor - self.config.norm_offset
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2])
        return halves(tensor, heads) if heads and self.metadata["general.architecture"] in PAIRED else tensor


class Dequantised(Mapping[str, Tensor]):
    def __init__(self, stored: Mapping[str, Any]):
        self.stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return dequantised(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def dequantised(tensor: Any, part: int | None = None) -> Tensor:
    """A tensor's numbers, or those of a part of its first dimension."""
    from gguf.quants import dequantize

    data = tensor.data if part is None else tensor.data[part]
    try:
        return torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
    except (ValueError, NotImplementedError, TypeError) as problem:
        kind = tensor.tensor_type.name
        raise CheckpointError(f"{tensor.name} cannot be dequantised from {kind}: {problem}") from problem


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head in RoPE's two halves, as ours, where llama.cpp keeps the two elements of a pair together."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def pairs(weight: Tensor, heads: int) -> Tensor:
    """The other way: rows of a head in RoPE's two halves, put together in pairs."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def is_of_experts(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in EXPERTS


def hf_name(name: str, tensors: Tensors, expert: int = 0) -> str:
    """What Hugging Face calls a tensor, in a family that calls its own as `tensors` says; of all experts, that of one."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk.") or stem.count(".") < 2:
        return f"{NAMES.get(stem, stem)}.{kind}"
    _, layer, part = stem.split(".", 2)
    known = LAYER_NAMES.get(part, part)
    if part in NORM_NAMES:
        known = tensors.norms.get(NORM_NAMES[part], part)
    if part == "ffn_up" and "gate_up" in tensors.fused:
        known = "mlp.gate_up_proj"
    if part == "ffn_gate_inp":
        known = f"{tensors.experts_block}.gate"
    if part in EXPERTS:
        known = f"{tensors.experts_block}.experts.{expert}.{tensors.expert[EXPERTS.index(part)]}"
    return f"model.layers.{layer}.{known}.{kind}"
