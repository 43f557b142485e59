"""Modules on our operators, under PyTorch's names. `tilestack.patch` puts them into a model that is already there."""

from tilestack.nn import sparse
from tilestack.nn.attention import MultiheadAttention, attend, register_attention
from tilestack.nn.mlp import MLP
from tilestack.nn.modules import GELU, Conv2d, GroupNorm, LayerNorm, Linear, ReLU, RMSNorm, Sigmoid, SiLU, Softmax, Tanh
from tilestack.nn.moe import MoE
from tilestack.nn.rotary_attention import Attention, KeyValueCache
from tilestack.nn.router import Balance, LoadWindow, Router

__all__ = [
    "GELU",
    "MLP",
    "Attention",
    "Balance",
    "Conv2d",
    "GroupNorm",
    "KeyValueCache",
    "LayerNorm",
    "Linear",
    "LoadWindow",
    "MoE",
    "MultiheadAttention",
    "RMSNorm",
    "ReLU",
    "Router",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "attend",
    "register_attention",
    "sparse",
]
