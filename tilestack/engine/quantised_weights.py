"""Weights of 8 or 4 bits beside activations of the model's own dtype: the projections of attention and feed-forward.

    fp8    float8_e4m3fn, a scale for each output; many rows become fp8 codes too (quant/linear.py)
    int8   a scale for each output
    int4   two to a byte, a scale for 128 numbers of an output, or for 64 or 32 where these are whole

Experts are what a mixture's weights are, and become codes too; their rows stay as they are. The embedding, the norms, the
routers and the head keep their numbers: tokens are drawn by the head's scores, and where head and embedding
are one, rows of it are looked up as well.
"""

import functools
from pathlib import Path
from typing import Any

import torch

from tilestack import models
from tilestack.engine.cpu_weights import Int8Linear, pack_for_cpu, take_codes, take_int8, unpack_codes
from tilestack.models import Decoder
from tilestack.models.checkpoints import code_formats
from tilestack.nn import Linear, MoE
from tilestack.ops.weight_only import PACKED
from tilestack.quant import SCHEMES
from tilestack.quant.experts import PROJECTIONS, quantise_experts
from tilestack.quant.linear import quantise_linear

FORMATS = dict(fp8=SCHEMES["fp8"], int8=SCHEMES["w8a16"], int4=SCHEMES["w4a16"])
FP8_CAPABILITY = 8, 9  # of GPUs that convert from and to fp8


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


def quantise_layer(path: str, layer: torch.nn.Module, weights: str) -> None:
    """Make codes of the weight of a decoder's layer, where it is linear and not the head, or of its experts."""
    if path == "head" or type(layer) not in (Linear, MoE):
        return
    scheme = FORMATS[weights]
    of_experts = {f"{path}.{name}": getattr(layer, name) for name in PROJECTIONS} if isinstance(layer, MoE) else {}
    for name, weight in (of_experts or {path: layer.weight}).items():
        if not scheme.takes(weight.shape[-1]):
            raise ValueError(
                f"weights of {weights} need rows of a multiple of {PACKED} numbers, and those of {name} have "
                f"{weight.shape[-1]}; int8 takes any"
            )
    quantise_experts(layer, scheme) if isinstance(layer, MoE) else quantise_linear(layer, scheme)  # type: ignore[arg-type]


def quantise_weights(decoder: Decoder, weights: str) -> None:
    """Make codes of a decoder's weights, layer by layer; for inference only."""
    refuse_weights(weights, decoder.embedding.weight.device)
    for path, layer in list(decoder.named_modules()):
        quantise_layer(path, layer, weights)


def load_decoder(model: str | Path, weights: str | None, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A model by its name, folder or file, with weights of a format, or its own. Each layer is made codes before the next is
    read, so that a model need only fit in as codes. A checkpoint of codes keeps them."""
    if weights is not None:
        refuse_weights(weights, device)
    own = {format.scheme.weights for format in code_formats(model)}
    if own and weights is not None:
        raise ValueError(f"the weights of {model} are codes of {' and '.join(sorted(own))} already; leave weights out")
    for each in own:
        refuse_weights(each, device)
    if weights == "int8" and device.type == "cpu":
        decoder = models.load(model, dtype=dtype, device=device)
        pack_for_cpu(decoder, weights)  # as the compiled step reads them
    else:
        filled = None if weights is None else functools.partial(quantise_layer, weights=weights)
        decoder = models.load(model, dtype=dtype, device=device, filled=filled)
    if device.type == "cpu":
        take_int8(decoder)
        take_codes(decoder)
        unpack_codes(decoder)
    return decoder


def has_codes(decoder: Decoder) -> bool:
    """Whether layers are of codes, or were until a CPU had them unpacked."""
    return bool(formats_of(decoder))


def formats_of(decoder: Decoder) -> set[str]:
    layers: list[Any] = [layer for layer in decoder.modules() if isinstance(layer, Linear)]
    found = {layer.scheme.weights for layer in layers if hasattr(layer, "scheme")}
    mixtures: list[Any] = [layer for layer in decoder.modules() if isinstance(layer, MoE)]
    found |= {scheme.weights for layer in mixtures for scheme in getattr(layer, "schemes", {}).values()}
    return found | {"int8" for layer in layers if isinstance(layer, Int8Linear)}


def weights_in_words(decoder: Decoder) -> str:
    """What the weights of a decoder's layers are: fp8, int8 or int4 where they are codes, or a dtype."""
    return " and ".join(sorted(formats_of(decoder))) or str(decoder.embedding.weight.dtype).removeprefix("torch.")
