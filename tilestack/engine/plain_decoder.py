"""Decoders that can be stepped in one call: what such a step has no code for, and the weights that it reads.

GPU   a batch of one as a persistent kernel, where there is nvcc (persistent.py)
CPU   a few tokens as one C++ function, where there is a compiler (cpu_step.py)
"""

import torch

from tilestack.models import Decoder, ModelConfig
from tilestack.models.norm import Norm

# Settings of a decoder that must be as they are by default, by the words for others.
PLAIN = dict(
    experts="experts",
    kv_rank="latent attention",
    windows="windows",
    qkv_bias="biases",
    output_bias="biases",
    mlp_bias="biases",
    post_norms="norms after its blocks",
    norm_offset="norms with an offset",
    attention_softcap="capped scores",
    logit_softcap="capped logits",
    embedding_scale="scaled embeddings",
    residual_scale="a scaled residual stream",
    logit_divisor="divided logits",
    rotary_factor="heads that are turned in part",
    rotary_interleaved="interleaved rotation",
    activation="another activation than silu",
    pre_norms="no norms before its blocks",
)


def not_plain(decoder: Decoder) -> str:
    """What a decoder has that no step has code for; empty when nothing."""
    config = decoder.config
    defaults = {name: ModelConfig.__dataclass_fields__[name].default for name in PLAIN}
    for name, words in PLAIN.items():
        if getattr(config, name) != defaults[name]:
            return f"the model has {words}"
    if config.qk_norm == "projection":
        return "the model normalises all its queries together"
    if any(is_wrapped(module) for module in decoder.modules() if module is not decoder):
        return "modules of the model are wrapped or listened to"
    if any(type(each) is not torch.nn.Parameter for each in decoder.parameters()):
        return "weights of the model are not plain tensors"
    return "the model's rotation depends on the length of a text" if decoder.rotates_by_length else ""


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether calling a module does something else or more than its class says."""
    return "forward" in module.__dict__ or bool(module._forward_hooks or module._forward_pre_hooks)


def linears_of(layer: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """In the order of the steps."""
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down  # type: ignore


def norms_of(layer: torch.nn.Module) -> tuple[Norm | None, ...]:
    """Before attention and feed-forward, then of queries and keys."""
    return layer.attention_norm, layer.mlp_norm, layer.attention.q_norm, layer.attention.k_norm  # type: ignore
