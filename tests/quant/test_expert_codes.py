"""Mixtures whose experts are codes: in and out of checkpoints, served, and what is broken or cannot be done, by name."""

import re

import pytest
import tiny_models as tiny
import torch
from code_models import (
    ALL,
    KINDS,
    MIXTURES,
    SIZES_OF_MIXTURES,
    code_layers,
    mixtures,
    quantised_mixture,
    same,
    with_numbers,
)
from published import FORMATS, change_config, change_tensors, publish
from safetensors import safe_open

from tilestack import backend, models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, SamplingParams
from tilestack.engine.cpu_weights import CodedMoE
from tilestack.engine.quantised_weights import quantise_weights
from tilestack.kernels.cpu import build
from tilestack.models.invariant import why_not_invariant
from tilestack.models.weights import unfused
from tilestack.nn import MoE
from tilestack.nn.lora import add_lora
from tilestack.quant import SCHEMES
from tilestack.quant.experts import QuantisedMoE, quantise_experts

PROMPT = [3, 5, 7, 11, 13, 3, 5, 7, 11]
VOCABULARY = 300
needs_compiler = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_codes_come_back_bit_for_bit(name, family, tmp_path):
    decoder = quantised_mixture(family, ALL[name])
    models.save(decoder, tmp_path / "model", shard_size=20_000)
    again = models.load(tmp_path / "model")
    assert list(mixtures(again)) == list(mixtures(decoder))
    assert list(code_layers(again)) == list(code_layers(decoder))
    for path, mixture in mixtures(decoder).items():
        there = mixtures(again)[path]
        for projection, stack in mixture.stacks.items():
            assert all(same(*pair) for pair in zip(stack, there.stacks[projection], strict=True)), (path, projection)
            own = mixture.schemes[projection]
            assert all(getattr(there.schemes[projection], each) == getattr(own, each) for each in (*KINDS, "group"))
        assert there.gate_up.is_meta
        assert same(mixture.router.weight.detach(), there.router.weight.detach())
    assert again(tiny.ids()).equal(decoder(tiny.ids()))
    torch.testing.assert_close(again(tiny.ids()), with_numbers(decoder)(tiny.ids()), rtol=1e-4, atol=1e-4)


def published(folder, name, family):
    """A folder of codes as others publish it; the decoder with their numbers."""
    decoder = tiny.ours(family, **SIZES_OF_MIXTURES[family] | dict(vocab_size=VOCABULARY))
    models.save(decoder, folder)
    numbers = publish(folder, name)
    with torch.no_grad():
        for weight, tensor in unfused(decoder):  # views, so that this changes the decoder
            if weight in numbers:
                tensor.copy_(numbers[weight])
    return decoder, numbers


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_what_others_publish_stands_for_its_numbers(name, family, tmp_path):
    plain, numbers = published(tmp_path / "model", name, family)
    assert sum(".experts." in weight for weight in numbers) >= 12
    decoder = models.load(tmp_path / "model")
    assert all(set(mixture.stacks) == {"gate_up", "down"} for mixture in mixtures(decoder).values())
    for (weight, tensor), (_, truth) in zip(unfused(with_numbers(decoder)), unfused(plain), strict=True):
        torch.testing.assert_close(tensor, truth, rtol=1e-6, atol=0, msg=weight)
    torch.testing.assert_close(decoder(tiny.ids()), plain(tiny.ids()), rtol=1e-4, atol=1e-4)


def test_one_projection_may_be_codes_and_the_other_not(tmp_path):
    decoder = tiny.ours("mixtral", **SIZES_OF_MIXTURES["mixtral"])
    for layer in decoder.layers:
        down = layer.mlp.down
        quantise_experts(layer.mlp, SCHEMES["w8a16"])
        del layer.mlp.stacks["down"], layer.mlp.schemes["down"]
        layer.mlp.down = down
    models.save(decoder, tmp_path / "model")
    again = models.load(tmp_path / "model")
    assert [set(mixture.stacks) for mixture in mixtures(again).values()] == [{"gate_up"}] * 2
    with torch.no_grad():
        assert again(tiny.ids()).equal(decoder(tiny.ids()))


@pytest.mark.parametrize("experts", [1, 5])
@torch.no_grad()
def test_a_mixture_may_have_one_expert_and_experts_without_tokens(experts):
    """Experts that no token reaches are not looked at: their scales may be anything."""
    torch.manual_seed(0)
    mixture = MoE(64, 32, experts, 1)
    plain = mixture.gate_up.detach().clone(), mixture.down.detach().clone()
    quantise_experts(mixture, SCHEMES["w4a16"])
    x = torch.randn(3, 64)
    chosen = {int(expert) for expert in mixture.router(x)[0].flatten()}
    for expert in {*range(experts)} - chosen:
        mixture.stacks["down"].scale[expert] = torch.nan
    expected = MoE(64, 32, experts, 1)
    expected.load_state_dict(mixture.state_dict() | dict(gate_up=plain[0], down=plain[1]))
    found = mixture(x)
    assert (found - expected(x)).norm() < 0.3 * expected(x).norm()
    assert mixture(torch.empty(0, 64)).shape == (0, 64)


@torch.no_grad()
def test_a_mixture_of_codes_is_one_graph_when_compiled():
    mixture = MoE(64, 32, 4, 2)
    quantise_experts(mixture, SCHEMES["w4a16"])
    x = torch.randn(2, 9, 64)
    compiled = torch.compile(mixture, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), mixture(x))


E = "model.layers.0.block_sparse_moe.experts"


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


def without_expert(expert):
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith(f"{E}.{expert}.")]


def another_expert(tensors):
    tensors |= {n.replace(".experts.3.", ".experts.4."): t.clone() for n, t in tensors.items() if ".experts.3." in n}


BROKEN = {
    "without a scale of one expert": ("w4a16", without(f"{E}.2.w3.weight_scale"), f"1 missing: {E}.2.w3.weight_scale"),
    "without words of one expert": ("w4a16", without(f"{E}.2.w2.weight_packed"), f"1 missing: {E}.2.w2.weight_packed"),
    "with a scale of another shape": (
        "w4a16", put(f"{E}.1.w1.weight_scale", lambda t: t[:1].contiguous()),
        rf"1 of the wrong shape: {E}.1.w1.weight_scale is \(1, 2\)",
    ),
    "with an expert of another width": (
        "fp8", put(f"{E}.3.w2.weight", lambda t: t[:, :64].contiguous()), rf"{E}.3.w2.weight is \(64, 64\) instead of \(64, 96\)",
    ),
    "with a scale that is no number": (
        "fp8", put(f"{E}.3.w2.weight_scale", lambda t: t * torch.nan), f"{E}.3.w2: weight_scale holds numbers that are not f",
    ),
    "without its last expert": ("w8a16", without_expert(3), f"9 missing: {E}.3.w1.weight_packed, {E}.3.w1.weight_scale"),
    "with more experts than it says": ("fp8", another_expert, r"12 unexpected: .*experts.4.w1.weight, "),
    "with one expert of plain weights": (
        "w8a16",
        lambda tensors: [without(*(f"{E}.1.w2.weight_{kind}" for kind in ("packed", "scale", "shape")))(tensors),
                         put(f"{E}.1.w2.weight", lambda _: torch.ones(64, 96))(tensors)],
        rf"{E}.0.w2 and {E}.1.w2 are kept in different ways",
    ),
    "with groups of another order in one expert": (
        "gptq", put(f"{E}.1.w2.g_idx", lambda t: t.flip(0)), rf"{E}.1.w2: g_idx puts numbers into groups in the order of act",
    ),
    "with codes of its router": (
        "w8a8", put("model.layers.0.block_sparse_moe.gate.weight", lambda t: t.to(torch.int8)), "moe.gate holds codes, and of these",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder(what, tmp_path):
    name, change, message = BROKEN[what]
    folder = tmp_path / "model"
    if name in ALL:
        models.save(quantised_mixture("mixtral", ALL[name]), folder)
    else:
        published(folder, name, "mixtral")
    models.load(folder)
    change_tensors(folder, change)
    with pytest.raises(models.CheckpointError) as raised:
        models.load(folder)
    assert len(str(raised.value).splitlines()) == 1
    assert re.search(message, str(raised.value))


def saved(folder, family, scheme):
    """A folder of codes with a tokenizer; the plain decoder with their numbers."""
    decoder = quantised_mixture(family, scheme, vocab_size=VOCABULARY)
    models.save(decoder, folder)
    Tokenizer.train(["a b c d e f g " * 30], VOCABULARY).save(folder)
    return with_numbers(decoder)


def settings(**asked):
    return EngineSettings(**(dict(device="cpu", dtype="float32", page=4, kv_memory=1 << 22) | asked))


def alone(decoder):
    return [int(step[0]) for step in models.generate(decoder, torch.tensor([PROMPT]), max_new_tokens=10)]


def answer(engine):
    return (
        LLM(engine).generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)).completions[0].ids
    )


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8", "int4 groups with zeros"])
@pytest.mark.parametrize("family", MIXTURES)
def test_an_engine_serves_a_folder(name, family, tmp_path):
    plain = saved(tmp_path / "model", family, ALL[name])
    engine = Engine.load(tmp_path / "model", settings())
    assert answer(engine) == alone(plain)
    assert engine.weights == ALL[name].weights
    if not build.missing_compiler():
        found = {type(layer.mlp) for layer in engine.decoder.layers if isinstance(layer.mlp, MoE)}
        assert found == {CodedMoE}


@pytest.mark.parametrize("asked", [dict(graphs=True, decode="operators"), dict(speculate="lookup")], ids=str)
def test_an_engine_serves_a_folder_in_graphs_and_with_guesses(asked, tmp_path):
    plain = saved(tmp_path / "model", "qwen3_moe", ALL["w4a16"])
    assert answer(Engine.load(tmp_path / "model", settings(**asked))) == alone(plain)


@pytest.mark.parametrize("name", ["w4a16", "fp8 blocks", "int8 groups with zeros"])
@torch.no_grad()
def test_a_decoder_on_our_kernel_says_what_it_says_by_the_definition(name):
    decoder = quantised_mixture("deepseek_v2", ALL[name])
    with backend(grouped_linear_weight_only="triton"):
        found = decoder(tiny.ids())
    torch.testing.assert_close(found, decoder(tiny.ids()), rtol=1e-4, atol=1e-4)


def test_without_a_compiler_experts_are_unpacked_and_why_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    plain = saved(tmp_path / "model", "mixtral", ALL["w4a16"])
    engine = Engine.load(tmp_path / "model", settings())
    assert [message for message in caplog.messages if "unpacked to float32" in message]
    assert {type(layer.mlp) for layer in engine.decoder.layers} == {MoE}
    assert engine.weights == "int4"
    assert answer(engine) == alone(plain)
    with pytest.raises(ValueError, match=r"no batch-invariant mode: .*this one is quantised"):
        Engine.load(tmp_path / "model", settings(batch_invariant=True))


@needs_compiler
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_experts_on_a_cpu_give_what_their_numbers_give(name, dtype):
    from tilestack.engine.cpu_weights import take_codes

    decoder = quantised_mixture("qwen3_moe", ALL[name]).to(dtype)
    path, mixture = next(iter(mixtures(decoder).items()))
    exact = with_numbers(decoder).get_submodule(path)
    x = torch.randn(30, 64).to(dtype)
    take_codes(decoder)
    assert type(mixture) is CodedMoE
    found, truth = mixture(x).float(), exact(x.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - truth).norm() < tolerance * truth.norm()


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_weights_of_a_mixture_are_made_codes_at_loading(weights, family, tmp_path):
    decoder = tiny.ours(family, **SIZES_OF_MIXTURES[family] | dict(vocab_size=VOCABULARY))
    models.save(decoder, tmp_path / "model")
    Tokenizer.train(["a b c d e f g " * 30], VOCABULARY).save(tmp_path / "model")
    engine = Engine.load(tmp_path / "model", settings(weights=weights))
    found = [layer.mlp for layer in engine.decoder.layers if isinstance(layer.mlp, MoE)]
    assert {scheme.weights for mixture in found for scheme in mixture.schemes.values()} == {weights}
    assert engine.weights == weights
    quantise_weights(decoder, weights)
    assert answer(engine) == alone(with_numbers(decoder))


def test_what_goes_with_no_codes_is_refused(tmp_path):
    decoder = tiny.ours("mixtral")  # rows of 80 numbers
    with pytest.raises(
        ValueError, match=r"int4 need rows of a multiple of 32 numbers, and those of layers.0.mlp.down have 80"
    ):
        quantise_weights(decoder, "int4")
    assert not mixtures(decoder)
    quantise_weights(decoder, "int8")
    assert why_not_invariant(decoder).startswith("the model's weights are codes")
    with pytest.raises(ValueError, match=r"lora: no linear layer is named \*.mlp.down"):
        add_lora(decoder, ["*.mlp.down"])
    saved(tmp_path / "model", "mixtral", ALL["w4a16"])
    with pytest.raises(ValueError, match=r"model are codes of int4 already; leave weights out"):
        Engine.load(tmp_path / "model", settings(weights="int8"))


def test_experts_alone_may_be_codes_and_the_config_names_what_is_not(tmp_path):
    decoder = tiny.ours("qwen3_moe", num_hidden_layers=3, **SIZES_OF_MIXTURES["qwen3_moe"])
    quantise_experts(decoder.layers[1].mlp, SCHEMES["w4a16"])
    models.save(decoder, tmp_path / "model")
    said = models.checkpoints.read_json(tmp_path / "model" / "config.json")["quantization_config"]
    ignored = lambda layer: any(
        re.match(name[3:], layer) if name.startswith("re:") else name == layer for name in said["ignore"]
    )
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    plain = {name.removesuffix(".weight") for name in names if name.endswith(("proj.weight", "gate.weight"))}
    coded = {name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")}
    assert {layer.split(".")[2] for layer in coded} == {"1"}
    assert all(map(ignored, plain))
    assert not any(map(ignored, coded))
    again = models.load(tmp_path / "model")
    assert [type(layer.mlp) is QuantisedMoE for layer in again.layers] == [False, True, False]


def test_a_config_that_says_other_bits_is_refused(tmp_path):
    models.save(quantised_mixture("mixtral", ALL["w4a16"]), tmp_path / "model")
    said = models.checkpoints.read_json(tmp_path / "model" / "config.json")["quantization_config"]
    for group in said["config_groups"].values():
        group["weights"]["num_bits"] = 8
    change_config(tmp_path / "model", said)
    with pytest.raises(models.CheckpointError, match=r"of the wrong shape: .*weight_packed"):
        models.load(tmp_path / "model")
