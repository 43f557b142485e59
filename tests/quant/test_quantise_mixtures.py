"""Mixtures quantised layer by layer: each expert by its own tokens, and what becomes of experts that few reach."""

import dataclasses
import itertools

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from code_models import MIXTURES, SIZES_OF_MIXTURES, code_layers, mixtures, numbers, with_numbers

from tilestack import models
from tilestack.models import quantise as driver
from tilestack.models.quantise import projections, quantise
from tilestack.models.quantise_experts import FEWEST, ExpertCount
from tilestack.nn import MoE
from tilestack.ops.weight_only import unpack_int4
from tilestack.quant import SCHEMES
from tilestack.quant.gptq import gptq
from tilestack.quant.methods import METHODS
from tilestack.quant.statistics import shrunk

W4 = dataclasses.replace(SCHEMES["w4a16"], group=32)
USEFUL = [
    (scheme, method) for scheme in SCHEMES for method in METHODS if method != "smooth" or SCHEMES[scheme].activations
]


def mixture_of(family="mixtral", **changes):
    return tiny.ours(family, **SIZES_OF_MIXTURES[family] | changes)


def ids(samples=16, length=24):
    return torch.randint(97, (samples, length), generator=torch.Generator().manual_seed(3))


def error_of(after, before):
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize(("scheme", "method"), USEFUL)
@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_every_scheme_and_method_keeps_what_a_mixture_says(scheme, method, family, tmp_path):
    decoder = mixture_of(family)
    before = decoder(tiny.ids())
    counted = quantise(decoder, SCHEMES[scheme], method, ids())
    after = decoder(tiny.ids())
    # More than a dense model: here and there a token goes to another expert, as these of random weights differ in everything.
    assert 0 < error_of(after, before) < (0.5 if scheme == "w4a16" else 0.2)
    sparse = [number for number in range(2) if decoder.config.sparse(number)]
    assert list(mixtures(decoder)) == [f"layers.{number}.mlp" for number in sparse]
    assert all(set(mixture.stacks) == {"gate_up", "down"} for mixture in mixtures(decoder).values())
    assert counted.experts == len(sparse) * decoder.config.experts
    models.save(decoder, tmp_path / "model")
    assert models.load(tmp_path / "model")(tiny.ids()).equal(after)


def tokens_of_experts(mixture, x):
    """The tokens [T, hidden] that go to each expert, by the router's logits."""
    rows = x.flatten(0, -2)
    chosen = (rows @ mixture.router.weight.T).topk(mixture.router.top_k).indices
    return [rows[(chosen == expert).any(1)] for expert in range(mixture.router.experts)]


@torch.no_grad()
def test_each_expert_is_calibrated_on_the_tokens_that_are_routed_to_it(monkeypatch):
    monkeypatch.setattr(driver, "BATCH", 96)  # several batches
    decoder, reference, heard = mixture_of(), mixture_of(), []
    quantise(decoder, W4, "gptq", ids())
    quantise(reference, W4, "gptq", ids(), ignore=["layers.1.mlp"])
    # Its attention is codes by now and was not while the layer was listened to, so it is as it was before.
    reference.layers[1].attention = mixture_of().layers[1].attention
    reference.layers[1].mlp.register_forward_pre_hook(lambda module, given: heard.append(given[0]))
    reference.hidden(ids())
    plain = reference.layers[1].mlp
    for expert, mine in enumerate(tokens_of_experts(plain, heard[0])):
        gate, up = F.linear(mine, plain.gate_up[expert]).chunk(2, -1)
        for name, read in dict(gate_up=mine, down=F.silu(gate) * up).items():
            moments = (read.T @ read).double() / len(read)
            expected = gptq(getattr(plain, name)[expert], shrunk(moments, len(read)), W4)
            found = decoder.layers[1].mlp.stacks[name].codes[expert]
            different = unpack_int4(found) != unpack_int4(expected.codes)
            assert different.float().mean() < 0.01, (expert, name)
            unlike = gptq(getattr(plain, name)[expert], torch.eye(read.shape[1]).double(), W4)
            assert (unpack_int4(found) != unpack_int4(unlike.codes)).float().mean() > 0.03


@torch.no_grad()
def test_gptq_of_experts_is_better_than_rounding_to_nearest():
    errors = {}
    for method in ("nearest", "gptq"):
        decoder = mixture_of("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
        # Inputs that go together, as those of trained models do.
        torch.manual_seed(1)
        decoder.embedding.weight.copy_(torch.randn(97, 6) @ torch.randn(6, 64) + 0.1 * torch.randn(97, 64))
        before = decoder(tiny.ids(8))
        quantise(decoder, W4, method, ids(64), ignore=["*.attention.*"])
        errors[method] = error_of(decoder(tiny.ids(8)), before)
    assert errors["gptq"] < 0.8 * errors["nearest"]


@torch.no_grad()
@pytest.mark.parametrize("method", ["gptq", "awq", "clip"])
def test_an_expert_that_no_token_reaches_is_rounded_to_the_nearest_and_counted(method):
    decoder = mixture_of()
    for layer in decoder.layers:
        # Of experts 0 to 3, tokens choose 1 and 3 whatever they are.
        layer.mlp_norm.weight.fill_(0)
        layer.mlp_norm.weight[0] = 1.0
        layer.mlp.router.weight.zero_()
        layer.mlp.router.weight[[1, 3], 0] = 1.0
        layer.mlp.router.weight[[0, 2], 0] = -1.0
    decoder.embedding.weight[:, 0] = decoder.embedding.weight[:, 0].abs() + 5
    before = decoder.layers[0].mlp.down.clone()
    counted = quantise(decoder, W4, method, ids())
    assert counted == ExpertCount(8, 4)
    stack = decoder.layers[0].mlp.stacks["down"]
    for expert in range(4):
        same = stack.codes[expert].equal(W4.round_to_nearest(before[expert]).codes)
        assert same == (expert in (0, 2))


@torch.no_grad()
def test_few_tokens_are_too_few():
    """A token goes to two of four experts of each layer; experts have as many tokens as chose them."""
    decoder = mixture_of()
    counted = quantise(decoder, W4, "gptq", ids(1, FEWEST // 2))
    assert counted == ExpertCount(8, 8)
    decoder = mixture_of()
    assert quantise(decoder, W4, "nearest") == ExpertCount(8, 0)  # which is what was asked for
    decoder = mixture_of()
    assert quantise(decoder, W4, "clip") == ExpertCount(8, 0)  # without texts, grids are chosen by the weights


@torch.no_grad()
def test_awq_folds_into_up_of_the_same_expert_and_nothing_into_the_norm(monkeypatch):
    decoder, plain = mixture_of("deepseek_v2"), mixture_of("deepseek_v2")
    awq, given = METHODS["awq"], []
    noting = lambda weight, *more: given.append(weight.detach().clone()) or awq.round(weight, *more)
    monkeypatch.setitem(METHODS, "awq", dataclasses.replace(awq, round=noting))
    quantise(decoder, SCHEMES["w8a16"], "awq", ids(64))
    norm = lambda each: each.layers[1].mlp_norm.weight
    assert torch.equal(norm(decoder), norm(plain))
    experts = [pair for pair in itertools.pairwise(given) if pair[0].shape == (192, 64) and pair[1].shape == (64, 96)][
        -8:
    ]
    for expert, (gate_up, down) in enumerate(experts):
        scale = down[0] / plain.layers[1].mlp.down[expert, 0]
        assert scale.max() > 1.05 * scale.min()
        torch.testing.assert_close(down, plain.layers[1].mlp.down[expert] * scale)
        torch.testing.assert_close(gate_up[:96], plain.layers[1].mlp.gate_up[expert, :96])
        torch.testing.assert_close(gate_up[96:], plain.layers[1].mlp.gate_up[expert, 96:] / scale[:, None])


@torch.no_grad()
def test_smooth_leaves_experts_to_rounding():
    decoder, plain = mixture_of(), mixture_of()
    assert quantise(decoder, SCHEMES["w8a8"], "smooth", ids(1)) == ExpertCount(8, 0)
    mixture = decoder.layers[0].mlp
    for name, stack in mixture.stacks.items():
        for expert, weight in enumerate(getattr(plain.layers[0].mlp, name)):
            assert stack.codes[expert].equal(SCHEMES["w8a16"].round_to_nearest(weight).codes)
        assert mixture.schemes[name] == SCHEMES["w8a16"]
    assert not torch.equal(decoder.layers[0].attention_norm.weight, plain.layers[0].attention_norm.weight)


@torch.no_grad()
@pytest.mark.parametrize(
    ("ignore", "stacks"),
    [
        (["*.mlp"], {}),
        (["*.mlp.down"], {"layers.0.mlp": {"gate_up"}, "layers.1.mlp": {"gate_up"}}),
        (["layers.0.mlp.*", "*.attention.*"], {"layers.1.mlp": {"gate_up", "down"}}),
    ],
)
def test_experts_are_ignored_by_their_mixture_or_by_their_projections(ignore, stacks):
    decoder = mixture_of()
    before = [layer.mlp.down.clone() for layer in decoder.layers]
    quantise(decoder, W4, "awq", ids(), ignore=ignore)
    assert {path: set(mixture.stacks) for path, mixture in mixtures(decoder).items()} == stacks
    for layer, down in zip(decoder.layers, before, strict=True):
        assert layer.mlp.down.is_meta or torch.equal(layer.mlp.down, down)
    assert bool(code_layers(decoder)) == ("*.attention.*" not in ignore)


@torch.no_grad()
def test_groups_are_alike_in_all_projections_of_experts():
    """Rows of 64 and of 96 numbers have parts of 32, as one size of groups is read of all experts."""
    decoder = mixture_of()
    quantise(decoder, SCHEMES["w4a16"])
    for mixture in mixtures(decoder).values():
        assert {scheme.group for scheme in mixture.schemes.values()} == {32}
        assert {name: stack.scale.shape for name, stack in mixture.stacks.items()} == {
            "gate_up": (4, 192, 2), "down": (4, 64, 3),
        }  # fmt: skip


def test_what_cannot_be_codes_is_refused_before_anything_is_changed():
    broken, small = mixture_of(), tiny.ours("mixtral")  # rows of 80 numbers
    broken.layers[1].mlp.gate_up.data[2, 3, 4] = torch.nan
    for problem, call in {
        "the weight of layers.1.mlp.gate_up holds numbers that are not finite": lambda: quantise(broken, W4),
        "int4 needs rows of a multiple of 32 numbers, and those of layers.0.mlp.down have 80": lambda: quantise(
            small, W4
        ),
        "nothing is named experts; there are paths such as layers.0.attention.qkv": lambda: projections(
            small, SCHEMES["w8a16"], ["experts"]
        ),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()
    assert not mixtures(broken) | mixtures(small)
    quantise(small, SCHEMES["w8a16"], ignore=["*.attention.*"])
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up is a QuantisedMoE: quantise a model of plain weights"):
        quantise(small, SCHEMES["w8a16"], ignore=["*.attention.*"])


@torch.no_grad()
def test_routers_and_shared_experts_are_what_they_should_be():
    decoder, plain = mixture_of("deepseek_v2"), mixture_of("deepseek_v2")
    quantise(decoder, W4, "gptq", ids())
    mixture = decoder.layers[1].mlp
    assert torch.equal(mixture.router.weight, plain.layers[1].mlp.router.weight)
    assert {"layers.1.mlp.shared.gate_up", "layers.1.mlp.shared.down"} <= set(code_layers(decoder))
    assert error_of(numbers(mixture.shared.down), plain.layers[1].mlp.shared.down.weight) < 0.2
    assert type(with_numbers(decoder).layers[1].mlp) is MoE
