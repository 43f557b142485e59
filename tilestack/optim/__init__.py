"""Optimizers: torch's, each with its step in one launch for all tensors; see docs/optimizers.md."""

from tilestack.optim.adam import Adam, AdamW
from tilestack.optim.adam_8bit import AdamW8bit
from tilestack.optim.clip import clip_grad_norm_
from tilestack.optim.muon import Muon
from tilestack.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "AdamW8bit", "Muon", "clip_grad_norm_"]
