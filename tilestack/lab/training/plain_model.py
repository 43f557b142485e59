"""The same decoder as people write it in plain PyTorch, without tilestack: what a training step here is held against.

Llama's shape, with Qwen3's norms of queries and keys where the configuration is Qwen3's: PyTorch's own linear layers,
rms_norm, scaled_dot_product_attention and cross_entropy.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

HF_NAMES = {
    "model.": "", "lm_head": "head", "embed_tokens": "embedding", "self_attn.": "attention.", "o_proj": "out", "mlp.": "",
    "_proj": "", "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
}  # fmt: skip


def plain_name(name: str) -> str:
    """Hugging Face's name of a weight, in the words used here."""
    return functools.reduce(lambda text, pair: text.replace(*pair), HF_NAMES.items(), name)


def plain_norm(size: int, config: dict[str, Any]) -> nn.RMSNorm:
    return nn.RMSNorm(size, config.get("rms_norm_eps", 1e-6))


class PlainAttention(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.dim = config.get("head_dim", hidden // self.heads)
        self.q = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, hidden, bias=False)
        normed = config["model_type"] == "qwen3"
        self.q_norm, self.k_norm = (plain_norm(self.dim, config) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = lambda y, heads: y.unflatten(-1, (heads, self.dim)).transpose(1, 2)  # [B, heads, T, dim]
        q = rotate(self.q_norm(split(self.q(x), self.heads)), cos, sin)
        k = rotate(self.k_norm(split(self.k(x), self.kv_heads)), cos, sin)
        v = split(self.v(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class PlainLayer(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.attention_norm, self.mlp_norm = plain_norm(hidden, config), plain_norm(hidden, config)
        self.attention = PlainAttention(config)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.feed_forward(self.attend(x, cos, sin))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin)

    def feed_forward(self, x: Tensor) -> Tensor:
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainDecoder(nn.Module):
    """Token ids to logits, for configurations in Hugging Face's words."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden = config["hidden_size"]
        self.embedding = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList([PlainLayer(config) for _ in range(config["num_hidden_layers"])])
        self.norm = plain_norm(hidden, config)
        self.head = nn.Linear(hidden, config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings"):
            self.head.weight = self.embedding.weight
        self.dim = config.get("head_dim", hidden // config["num_attention_heads"])
        self.theta = config.get("rope_theta", 10000.0)

    @classmethod
    def load(cls, folder: Path) -> "PlainDecoder":
        """The model of a Hugging Face folder."""
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] not in ("llama", "qwen3"):
            raise ValueError(f"there is no {config['model_type']} in plain PyTorch here")
        model = cls(config)
        tensors = {plain_name(name): t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        if config.get("tie_word_embeddings"):
            tensors["head.weight"] = tensors["embedding.weight"]
        model.load_state_dict(tensors)
        return model

    def angles(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of RoPE, [T, dim] each."""
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2, device=device) / self.dim)
        angles = torch.arange(length, device=device)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        cos, sin = self.angles(ids.shape[1], ids.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
