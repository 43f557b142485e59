"""What `models.save` writes of a decoder of codes, `models.load` reads: the same codes, bit for bit."""

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models.weights import rows_of_matrices
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
FAMILIES = ["smollm2", "llama_biased", "qwen3", "phi3", "glm4", "gemma3"]


def quantised(family, scheme, **sizes):
    """A decoder whose projections are codes, and whose head, where it has one, is not."""
    decoder = tiny.ours(family, **SIZES | sizes)
    matrices = rows_of_matrices(decoder.config)
    for path, layer in decoder.named_modules():
        if type(layer) is Linear and path != "head":  # matrix by matrix, as blocks are of one matrix
            rows = matrices.get(f"{path}.weight", [layer.out_features])
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_codes_come_back_bit_for_bit(name, family, tmp_path):
    decoder = quantised(family, ALL[name])
    models.save(decoder, tmp_path / "model", shard_size=20_000)
    again = models.load(tmp_path / "model")
    here, there = code_layers(decoder), code_layers(again)
    assert list(here) == list(there)
    assert len(here) == 4 * decoder.config.layers
    for path, layer in here.items():
        for one, other in zip(layer.kept, there[path].kept, strict=True):
            assert same(one, other), path
        assert all(getattr(there[path].scheme, each) == getattr(ALL[name], each) for each in KINDS)
    ids = tiny.ids()
    assert again(ids).equal(decoder(ids))
