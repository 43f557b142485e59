"""Decoder language models: one decoder for the Llama, Qwen, Mixtral, DeepSeek, Gemma, Phi, OLMo, Granite and GLM families,
its weights in and out."""

from tilestack.models import gguf
from tilestack.models.cache import KVCache
from tilestack.models.checkpoints import load, locate, save
from tilestack.models.config import ModelConfig
from tilestack.models.decoder import Decoder
from tilestack.models.generate import generate
from tilestack.models.gguf_writer import save_gguf
from tilestack.models.keys import ConfigError
from tilestack.models.paged import PagedBatch, PagedCache
from tilestack.models.weights import CheckpointError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "KVCache",
    "ModelConfig",
    "PagedBatch",
    "PagedCache",
    "generate",
    "gguf",
    "load",
    "locate",
    "save",
    "save_gguf",
]
