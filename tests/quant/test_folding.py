"""Scales folded into what comes before leave every family's outputs as they were, and the driver uses no others."""

import pytest
import tiny_models as tiny
import torch

from tilestack.models.folding import folds_of
from tilestack.nn import MLP

NORMS = {"attention.qkv", "mlp.gate_up"}
ROWS = {"attention.output", "mlp.down"}
LATENT = {"attention.qkv", "attention.kv_up"}


def expected_folds(family, layer):
    names = NORMS | ROWS
    if family == "olmo2":
        names = ROWS
    if family.startswith("deepseek"):
        names = LATENT | {"mlp.gate_up", "mlp.down"} | ({"attention.q_up"} if family == "deepseek_v2" else set())
    shared = {"mlp.shared.down"} if not isinstance(layer.mlp, MLP) and layer.mlp.shared is not None else set()
    return names if isinstance(layer.mlp, MLP) else {name for name in names if name.startswith("attention")} | shared


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.no_grad()
def test_folding_leaves_the_outputs_as_they_were(family):
    decoder, ids = tiny.ours(family).double(), tiny.ids()
    for parameter in decoder.parameters():
        if parameter.ndim == 1:  # norms that do something, and biases that are there
            parameter.add_(0.3 * torch.randn_like(parameter))
    before = decoder(ids)
    for layer in decoder.layers:
        found = folds_of(layer)
        assert {fold.name for fold in found} == expected_folds(family, layer)
        for fold in found:
            was = fold.reader.weight.clone()
            scale = torch.rand(fold.reader.in_features, dtype=torch.float64) * 3 + 0.2
            scale = fold.shared(scale)
            divided_by = fold.apply(scale)
            assert torch.allclose(divided_by, scale)
            assert torch.allclose(fold.reader.weight, was * scale)
    assert torch.allclose(decoder(ids), before, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_what_rounding_a_norm_leaves_goes_into_the_reader():
    decoder = tiny.ours("gemma2").to(torch.bfloat16)
    fold = folds_of(decoder.layers[0])[0]
    fold.reader.weight.data = fold.reader.weight.float()
    before = (fold.maker.weight.float() + 1) * fold.reader.weight
    fold.apply(torch.rand(64) * 3 + 0.2)
    after = (fold.maker.weight.float() + 1) * fold.reader.weight
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-7)  # bfloat16 alone would be off by a thousandth


@pytest.mark.parametrize(
    ("family", "dtype", "small", "scale"),
    [
        ("gemma2", torch.bfloat16, 0.05 - 1, 60.0),  # -1 + 0.0008 is -1
        ("llama3", torch.float16, 1e-4, 1e5),
        ("llama3", torch.float16, 1e2, 1e-4),
    ],
)
@torch.no_grad()
def test_a_norm_keeps_what_its_dtype_cannot_hold_divided(family, dtype, small, scale):
    fold = folds_of(tiny.ours(family).to(dtype).layers[0])[0]
    fold.reader.weight.data = fold.reader.weight.float()
    fold.maker.weight[3] = small
    result = lambda: (fold.maker.weight.float() + getattr(fold.maker, "offset", 0.0)) * fold.reader.weight
    before = result()
    scales = torch.ones(64).index_fill(0, torch.tensor([3]), scale)
    assert fold.apply(scales)[3] == 1
    assert before[:, 3].any()
    assert torch.allclose(result(), before)


def test_scales_of_grouped_heads_are_means_over_the_heads_that_share_a_value():
    decoder = tiny.ours("llama3")  # 4 heads of 16, 2 of values
    (fold,) = (each for each in folds_of(decoder.layers[0]) if each.name == "attention.output")
    squares = torch.arange(64.0)
    shared = fold.shared(squares).view(4, 16)
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[2], shared[3])
    assert torch.equal(shared[0], (squares[:16] + squares[16:32]) / 2)
