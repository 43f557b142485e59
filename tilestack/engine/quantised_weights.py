"""Weights of 8 or 4 bits beside activations of the model's own dtype: the projections of attention and feed-forward.

    fp8    float8_e4m3fn, a scale for each output
    int8   a scale for each output
    int4   two to a byte, a scale for 128 numbers of an output, or for 64 or 32 where these are whole

Decoding takes as long as its weights take to be read, so half of the bytes is half of the time. A product of few rows makes
numbers of the codes on their way to the tensor cores: weights are rounded, once, and nothing else. Of many rows, as prompts
have, the arithmetic takes longer than the reading, and tensor cores multiply fp8 codes twice as fast as half precisions; so
there the rows become fp8 codes too, each with a scale of its own. That is a rounding that steps of few rows do not have, and
float32, which is asked for its digits, does without it, as do int8 and int4.

The embedding, the norms and the head stay as they are: tokens are drawn by the head's scores, and where head and embedding
are one, rows of it are looked up as well.
"""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from tilestack import models, ops
from tilestack.engine.cpu_weights import Int8Linear, drop_weight, pack_for_cpu
from tilestack.models import Decoder
from tilestack.nn import Linear, MoE
from tilestack.ops.weight_only import quantise_weight

FORMATS = ("fp8", "int8", "int4")
GROUP, LEAST_GROUP = 128, 32  # numbers that share a scale in 4 bits
FEW = 64  # rows whose product with codes is taken up by reading them
FP8_CAPABILITY = 8, 9  # of GPUs that convert from and to fp8


class QuantisedLinear(Linear):
    """A layer of codes; made by `quantise_layer`."""

    codes: Tensor  # [out, in], or [out, in / 2] of 4 bits
    code_scale: Tensor  # [out, groups]

    def forward(self, input: Tensor) -> Tensor:
        if self.codes.dtype == torch.float8_e4m3fn and has_many_rows(input):
            rows, scale = ops.quantise_rows_fp8(input)
            dtype = f"{input.dtype}".removeprefix("torch.")
            return ops.linear_fp8(rows, self.codes, scale, self.code_scale[:, 0], self.bias, dtype)
        return ops.linear_weight_only(input, self.codes, self.code_scale, None, self.bias)


def has_many_rows(input: Tensor) -> bool:
    """Whether rows of half precision are so many that they are better multiplied as codes."""
    return input.dtype in (torch.bfloat16, torch.float16) and input.shape[:-1].numel() > FEW


def refuse_weights(weights: str, device: torch.device) -> None:
    """Raise where a device cannot serve such weights."""
    if weights not in FORMATS:
        raise ValueError(
            f"no weights {weights!r}; choose from {', '.join(FORMATS)}, or leave it out to keep those of the model"
        )
    if weights == "fp8" and device.type == "cuda":
        has = torch.cuda.get_device_capability(device)
        dotted = lambda capability: ".".join(map(str, capability))
        if has < FP8_CAPABILITY:
            raise ValueError(
                f"weights of fp8 need compute capability {dotted(FP8_CAPABILITY)}, and this GPU has {dotted(has)}; int8 "
                "takes as much memory"
            )


@torch.no_grad()
def quantise_layer(path: str, layer: torch.nn.Module, weights: str) -> None:
    """Make codes of the weight of a decoder's layer, where it is linear and not the head."""
    if isinstance(layer, MoE):
        raise ValueError(f"weights of {weights} are for dense models so far, and {path} has experts")
    if type(layer) is not Linear or path == "head":
        return
    if weights == "int4" and layer.in_features % LEAST_GROUP:
        raise ValueError(
            f"weights of int4 need rows of a multiple of {LEAST_GROUP} numbers, and those of {path} have "
            f"{layer.in_features}; int8 takes any"
        )
    group = math.gcd(GROUP, layer.in_features) if weights == "int4" else 0
    codes, scale, _ = quantise_weight(layer.weight, weights, group)
    layer.__class__ = QuantisedLinear
    layer.codes, layer.code_scale = codes, scale  # type: ignore[assignment]
    drop_weight(layer)


def quantise_weights(decoder: Decoder, weights: str) -> None:
    """Make codes of a decoder's weights, layer by layer; for inference only."""
    refuse_weights(weights, decoder.embedding.weight.device)
    for path, layer in list(decoder.named_modules()):
        quantise_layer(path, layer, weights)


def load_decoder(model: str | Path, weights: str | None, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A model by its name, folder or file, with weights of a format, or its own. Each layer is made codes before the next is
    read, so that a model need only fit in as codes."""
    if weights is not None:
        refuse_weights(weights, device)
    if weights == "int8" and device.type == "cpu":
        decoder = models.load(model, dtype=dtype, device=device)
        pack_for_cpu(decoder, weights)  # as the compiled step reads them
        return decoder
    filled = None if weights is None else functools.partial(quantise_layer, weights=weights)
    return models.load(model, dtype=dtype, device=device, filled=filled)


def has_codes(decoder: Decoder) -> bool:
    return any(isinstance(layer, QuantisedLinear | Int8Linear) for layer in decoder.modules())
