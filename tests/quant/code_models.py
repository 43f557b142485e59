"""Tiny decoders of codes, and the plain decoders with the numbers that the codes stand for."""

import copy

import tiny_models as tiny
import torch

from tilestack import ops
from tilestack.models.weights import layout
from tilestack.nn import Linear, MoE
from tilestack.quant import SCHEMES, Codes, QuantisedLinear, Scheme
from tilestack.quant.experts import PROJECTIONS, QuantisedMoE, put_codes, scheme_of_experts, stacked
from tilestack.quant.linear import quantise_linear

# Rows of whole groups of 32, and of 64 in some layers alone, so that groups differ between layers.
SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32)
# The same of mixtures, whose experts have rows of 64 and of 96 numbers, so that parts of 32 are what all of them have.
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v2"]
LATENTS = dict(q_lora_rank=32, kv_lora_rank=32, v_head_dim=16)
SIZES_OF_MIXTURES = {
    name: SIZES | ({} if name == "mixtral" else dict(moe_intermediate_size=96)) | (LATENTS if "deep" in name else {})
    for name in MIXTURES
}
MORE = {
    "fp8 blocks": Scheme("fp8", 128, activations="fp8", blocks=True),
    "int8 groups with zeros": Scheme("int8", 32, symmetric=False),
    "int4 groups with zeros": Scheme("int4", 64, symmetric=False),
    "int4 rows": Scheme("int4"),
}
ALL = SCHEMES | MORE
KINDS = ("weights", "symmetric", "activations", "blocks")  # groups are of what a layer's rows have


def quantised(family, scheme, **sizes):
    """A decoder whose projections are codes, and whose head, where it has one, is not."""
    decoder = tiny.ours(family, **SIZES | sizes)
    pieces = layout(decoder.config)
    for path, layer in decoder.named_modules():
        if type(layer) is Linear and path != "head":  # matrix by matrix, as blocks are of one matrix
            rows = [piece.rows for piece in pieces[f"{path}.weight"]]
            quantise_linear(layer, scheme, codes_of(scheme, layer.weight, rows))
    return decoder


def quantised_mixture(family, scheme, **sizes):
    """The same of a mixture, whose experts are codes too."""
    decoder = quantised(family, scheme, **SIZES_OF_MIXTURES[family] | sizes)
    for path, mixture in decoder.named_modules():
        if isinstance(mixture, MoE):
            own, pieces = scheme_of_experts(mixture, scheme), layout(decoder.config)
            for name in PROJECTIONS:
                rows = [piece.rows for piece in pieces[f"{path}.{name}"]][:2] if name == "gate_up" else None
                parts = [codes_of(own, weight, rows or [len(weight)]) for weight in getattr(mixture, name).detach()]
                put_codes(mixture, name, own, stacked(parts))
    return decoder


def codes_of(scheme, weight, rows):
    """The codes of a matrix, made of each of those that it is of by itself."""
    parts = [scheme.round_to_nearest(part) for part in weight.split(rows)]
    return Codes(*(None if some[0] is None else torch.cat(some) for some in zip(*parts, strict=True)))


def mixtures(decoder):
    return {path: layer for path, layer in decoder.named_modules() if isinstance(layer, QuantisedMoE)}


def code_layers(decoder):
    return {path: layer for path, layer in decoder.named_modules() if isinstance(layer, QuantisedLinear)}


def same(one, other):
    """Whether two tensors have the same bits, of whatever dtype."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.view(torch.uint8).equal(other.view(torch.uint8))
    )


@torch.no_grad()
def numbers(layer):
    """The weight [out, in] that a layer's codes stand for, in float32."""
    return ops.linear_weight_only(torch.eye(layer.in_features), *layer.kept).T


def with_numbers(decoder, dtype=torch.float32):
    """The same decoder with plain weights in place of codes."""
    decoder = copy.deepcopy(decoder)
    for layer in code_layers(decoder).values():
        weight = numbers(layer)
        layer.__class__ = Linear
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    for mixture in mixtures(decoder).values():
        for name, stack in mixture.stacks.items():
            each = [stack.each(lambda codes, e=e: codes[e]) for e in range(mixture.router.experts)]
            numbers_of = [
                ops.linear_weight_only(torch.eye(getattr(mixture, name).shape[-1]), *codes).T for codes in each
            ]
            setattr(mixture, name, torch.nn.Parameter(torch.stack(numbers_of), requires_grad=False))
        mixture.__class__ = MoE
    return decoder.to(dtype)
