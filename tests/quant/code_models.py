"""Tiny decoders of codes, and the plain decoders with the numbers that the codes stand for."""

import copy

import tiny_models as tiny
import torch

from tilestack import ops
from tilestack.models.weights import layout
from tilestack.nn import Linear
from tilestack.quant import SCHEMES, Codes, QuantisedLinear, Scheme
from tilestack.quant.linear import quantise_linear

# Rows of whole groups of 32, and of 64 in some layers alone, so that groups differ between layers.
SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32)
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
            parts = [scheme.round_to_nearest(part) for part in layer.weight.split(rows)]
            codes = Codes(*(None if some[0] is None else torch.cat(some) for some in zip(*parts, strict=True)))
            quantise_linear(layer, scheme, codes)
    return decoder


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
    return decoder.to(dtype)
