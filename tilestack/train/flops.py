"""How much arithmetic a token takes, and how much a GPU can do: their ratio with the speed is the MFU."""

from typing import Any

import torch

from tilestack.train.recipe import Precision

# Dense bfloat16 TFLOP/s as the makers state them, by a part of the GPU's name.
PEAKS = {"B200": 2250, "GB200": 2500, "H200": 989, "H100": 989, "H20": 148, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}  # fmt: skip


def per_token(model: Any, sequence: int) -> float:
    """Floating-point operations of a token in training: two for each weight it is multiplied with, three times (forward,
    and both gradients), and attention to half the sequence on average. Recomputed activations do not count."""
    config = model.config
    weights = 0.0
    for name, param in model.named_parameters():
        if param.ndim == 3:  # experts, of which a token meets a few
            weights += param[0].numel() * getattr(config, "top_k", len(param))
        elif param.ndim == 2 and "embed" not in name:
            weights += param.numel()
    if not any("head" in name for name, _ in model.named_parameters()):
        weights += model.head_weight.numel()  # tied to the embedding
    return 6 * weights + 6 * attention_width(config) * sequence


def attention_width(config: Any) -> float:
    """Elements a token multiplies with each token it sees, over all layers: halfway between queries' and values'."""
    query = config.nope_dim + config.rope_dim if config.kv_rank else config.head_dim
    value = config.value_dim if config.kv_rank else config.head_dim
    return config.layers * config.heads * (query + value) / 2


def peak(device: torch.device, precision: Precision) -> float:
    """The GPU's rate in operations a second, 0 where it is not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    found = next((rate for part, rate in PEAKS.items() if part in name), 0)
    return found * 1e12 * (2 if precision.fp8 else 1)
