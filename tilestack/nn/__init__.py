"""Modules on our operators, under PyTorch's names. `tilestack.patch` puts them into a model that is already there."""

from tilestack.nn.mlp import MLP
from tilestack.nn.modules import GELU, GroupNorm, LayerNorm, Linear, ReLU, RMSNorm, Sigmoid, SiLU, Softmax, Tanh

__all__ = ["GELU", "MLP", "GroupNorm", "LayerNorm", "Linear", "RMSNorm", "ReLU", "SiLU", "Sigmoid", "Softmax", "Tanh"]
