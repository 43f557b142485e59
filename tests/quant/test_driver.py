"""A decoder quantised layer by layer: which layers become codes, on what they are calibrated, and what it refuses."""

import dataclasses

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models import quantise as driver
from tilestack.models.quantise import projections, quantise
from tilestack.ops.weight_only import unpack_int4
from tilestack.quant import SCHEMES, QuantisedLinear
from tilestack.quant.gptq import gptq
from tilestack.quant.methods import METHODS
from tilestack.quant.statistics import InputStatistics

WIDE = dict(intermediate_size=96)  # whole groups of 32
W4 = dataclasses.replace(SCHEMES["w4a16"], group=32)


def ids(samples=8, length=24):
    return torch.randint(97, (samples, length), generator=torch.Generator().manual_seed(3))


def codes_of(decoder):
    return {path: layer.kept for path, layer in decoder.named_modules() if isinstance(layer, QuantisedLinear)}


USEFUL = [
    (scheme, method) for scheme in SCHEMES for method in METHODS if method != "smooth" or SCHEMES[scheme].activations
]


@pytest.mark.parametrize(("scheme", "method"), USEFUL)
def test_every_scheme_and_method_keeps_what_a_model_says(scheme, method, tmp_path):
    decoder = tiny.ours("llama3", **WIDE)
    with torch.no_grad():
        before = decoder(tiny.ids())
        quantise(decoder, SCHEMES[scheme], method, ids())
        after = decoder(tiny.ids())
    relative = (after - before).norm() / before.norm()
    assert 0 < relative < (0.4 if scheme == "w4a16" else 0.1)
    assert set(codes_of(decoder)) == {
        f"layers.{n}.{name}"
        for n in range(2)
        for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    }
    assert decoder.head is not None
    assert not isinstance(decoder.head, QuantisedLinear)
    models.save(decoder, tmp_path / "model")
    with torch.no_grad():
        assert models.load(tmp_path / "model")(tiny.ids()).equal(after)


@torch.no_grad()
def test_layers_are_calibrated_on_what_the_codes_before_them_give():
    decoder, reference = tiny.ours("llama3", **WIDE), tiny.ours("llama3", **WIDE)
    quantise(decoder, W4, "gptq", ids())
    quantise(reference, W4, "gptq", ids(), ignore=["layers.1.*"])
    heard = InputStatistics("moments")
    reference.layers[1].mlp.down.register_forward_pre_hook(lambda module, given: heard.add(given[0]))
    reference.hidden(ids())
    expected = gptq(reference.layers[1].mlp.down.weight, heard.result("down"), W4)
    assert torch.equal(decoder.layers[1].mlp.down.codes, expected.codes)
    plain = tiny.ours("llama3", **WIDE)
    unquantised = InputStatistics("moments")
    plain.layers[1].mlp.down.register_forward_pre_hook(lambda module, given: unquantised.add(given[0]))
    plain.hidden(ids())
    assert not torch.equal(expected.codes, gptq(plain.layers[1].mlp.down.weight, unquantised.result("down"), W4).codes)


@pytest.mark.parametrize("method", ["clip", "gptq", "awq"])
def test_the_same_texts_give_the_same_codes_and_their_order_almost_the_same(method, monkeypatch):
    monkeypatch.setattr(driver, "BATCH", 64)  # several batches
    decoders = [tiny.ours("llama3", **WIDE) for _ in range(3)]
    for decoder, some in zip(decoders, (ids(), ids(), ids().flip(0)), strict=True):
        quantise(decoder, W4, method, some)
    same, again, other = map(codes_of, decoders)
    assert all(torch.equal(same[path].codes, again[path].codes) for path in same)
    differing = torch.cat([(unpack_int4(same[p].codes) != unpack_int4(other[p].codes)).flatten() for p in same])
    assert differing.float().mean() < 0.01


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen2", "olmo2", "glm4", "granite", "phi3", "deepseek_v2"])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_families_with_other_norms_and_biases_are_quantised_well(family, method):
    ignore = ["*.mlp"] if family.startswith("deepseek") else []
    decoder = tiny.ours(family, hidden_size=64)
    before = decoder(tiny.ids())
    quantise(decoder, SCHEMES["w8a16"], method, ids(), ignore=ignore)
    assert (decoder(tiny.ids()) - before).norm() / before.norm() < 0.05
    assert len(codes_of(decoder)) >= 4


def test_activations_become_codes_in_calibration_too_where_the_scheme_says_so():
    """With smooth, an input channel that is huge no longer takes the digits of the others."""
    errors = {}
    for method in ("nearest", "smooth"):
        decoder = tiny.ours("llama3", **WIDE).to(torch.bfloat16)
        with torch.no_grad():
            for layer in decoder.layers:
                layer.mlp_norm.weight[5] = layer.attention_norm.weight[9] = 300.0
                layer.mlp.gate_up.weight[:, 5] /= 300
                layer.attention.qkv.weight[:, 9] /= 300
            before = decoder(tiny.ids(8)).float()
            quantise(decoder, SCHEMES["w8a8"], method, ids())
            errors[method] = float((decoder(tiny.ids(8)).float() - before).norm() / before.norm())
    assert errors["smooth"] < 0.5 * errors["nearest"]


def test_what_is_ignored_keeps_its_weight_and_dtype():
    decoder = tiny.ours("llama3", **WIDE).to(torch.bfloat16)
    weight = decoder.layers[0].attention.output.weight.clone()
    done = []
    quantise(decoder, W4, "gptq", ids(), ignore=["*.output", "layers.1.*"], progress=lambda *at: done.append(at))
    assert done == [(1, 2), (2, 2)]
    assert set(codes_of(decoder)) == {"layers.0.attention.qkv", "layers.0.mlp.gate_up", "layers.0.mlp.down"}
    assert torch.equal(decoder.layers[0].attention.output.weight, weight)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not decoder.layers[1].mlp.down._forward_pre_hooks


@pytest.mark.parametrize("ignored", ["attention.qkv", "mlp.gate_up"])
def test_scales_are_not_folded_into_what_is_ignored(ignored):
    decoder = tiny.ours("llama3", **WIDE).to(torch.bfloat16)
    weights = [layer.get_submodule(ignored).weight.clone() for layer in decoder.layers]
    quantise(decoder, W4, "awq", ids(), ignore=[f"*.{ignored}"])
    for layer, weight in zip(decoder.layers, weights, strict=True):
        assert torch.equal(layer.get_submodule(ignored).weight, weight)


def test_what_cannot_be_codes_is_refused_before_anything_is_changed():
    plain, broken = tiny.ours("llama3", **WIDE), tiny.ours("llama3", **WIDE)
    broken.layers[1].mlp.down.weight.data[3, 4] = torch.nan
    for problem, call in {
        "the weight of layers.1.mlp.down holds numbers that are not finite": lambda: quantise(broken, SCHEMES["fp8"]),
        "int4 needs rows of a multiple of 32 numbers, and those of layers.0.mlp.down have 80": lambda: quantise(
            tiny.ours("llama3"), SCHEMES["w4a16"]
        ),
        r"nothing is named attn.*; there are paths such as layers.0.attention.qkv": lambda: projections(
            plain, W4, ["attn.*"]
        ),
        "nothing left to quantise": lambda: projections(plain, W4, ["layers.*"]),
        "gptq needs calibration texts": lambda: quantise(plain, W4, "gptq"),
        "no method 'magic'": lambda: quantise(plain, W4, "magic"),
        "smooth is for schemes whose inputs": lambda: quantise(plain, W4, "smooth", ids()),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()
    assert not codes_of(plain)
    quantise(plain, W4)
    with pytest.raises(
        ValueError, match=r"layers.0.attention.qkv is a QuantisedLinear: quantise a model of plain weights"
    ):
        quantise(plain, W4)


def test_a_model_that_overflows_is_refused_by_the_layers_name():
    decoder = tiny.ours("llama3", **WIDE)
    with torch.no_grad():
        decoder.layers[1].mlp_norm.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"inputs of layers.1.mlp.gate_up are not finite"):
        quantise(decoder, W4, "gptq", ids())
    assert not decoder.layers[1].mlp.down._forward_pre_hooks


def test_weights_of_half_precision_are_not_rounded_between_folding_and_codes(monkeypatch):
    decoder, awq, given = tiny.ours("llama3", **WIDE).to(torch.bfloat16), METHODS["awq"], []
    noting = lambda weight, *more: given.append(weight.detach().clone()) or awq.round(weight, *more)
    monkeypatch.setitem(METHODS, "awq", dataclasses.replace(awq, round=noting))
    quantise(decoder, W4, "awq", ids())
    assert len(given) == 8
    assert not any(
        torch.equal(weight, weight.bfloat16().to(weight)) for weight in given
    )  # each is a reader of some fold


@torch.no_grad()
def test_awq_rounds_by_the_inputs_as_they_are_after_folding():
    decoder, heard = tiny.ours("llama3", **WIDE), InputStatistics("moments")
    folded = tiny.ours("llama3", **WIDE)
    folded.layers[0].attention.qkv.register_forward_pre_hook(lambda module, given: heard.add(given[0]))
    quantise(decoder, W4, "awq", ids())
    folded.layers[0].attention_norm.weight.copy_(decoder.layers[0].attention_norm.weight)
    scale = tiny.ours("llama3", **WIDE).layers[0].attention_norm.weight / folded.layers[0].attention_norm.weight
    assert scale.max() > 1.05 * scale.min()
    folded.hidden(ids())
    weight = folded.layers[0].attention.qkv.weight[:64] * scale  # queries, whose rows no other fold divides
    expected = METHODS["awq"].round(weight, heard.result("qkv"), W4)
    assert torch.allclose(decoder.layers[0].attention.qkv.code_scale[:64], expected.scale, rtol=1e-5)
