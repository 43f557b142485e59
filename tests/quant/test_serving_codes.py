"""Engines of quantised checkpoints say what the plain model says that has the numbers of the codes."""

import logging

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, MORE, code_layers, quantised, same, with_numbers

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, SamplingParams
from tilestack.engine.cpu_weights import CodedLinear, Int8Linear, take_codes, take_int8, unpack_codes
from tilestack.kernels.cpu import build
from tilestack.models.adapters import load_adapters, save_adapters
from tilestack.nn import Linear
from tilestack.nn.lora import add_lora, lora_parameters
from tilestack.quant import Scheme
from tilestack.quant.linear import quantise_linear

PROMPT = [3, 5, 7, 11, 13, 3, 5, 7, 11]
ANSWER = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
VOCABULARY = 300
needs_compiler = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")


def saved(folder, family, scheme):
    """A folder of codes with a tokenizer; the plain decoder with their numbers."""
    decoder = quantised(family, scheme, vocab_size=VOCABULARY)
    models.save(decoder, folder)
    Tokenizer.train(["a b c d e f g " * 30], VOCABULARY).save(folder)
    return with_numbers(decoder)


def settings(**asked):
    return EngineSettings(**(dict(device="cpu", dtype="float32", page=4, kv_memory=1 << 22) | asked))


def alone(decoder, prompt=PROMPT):
    return [int(step[0]) for step in models.generate(decoder, torch.tensor([prompt]), max_new_tokens=10)]


def answer(engine, adapter=None):
    return LLM(engine).generate(PROMPT, ANSWER, adapter=adapter).completions[0].ids


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("asked", [dict(), dict(graphs=True, decode="operators"), dict(speculate="lookup")], ids=str)
def test_an_engine_says_what_the_numbers_say(name, asked, tmp_path):
    plain = saved(tmp_path / "model", "qwen3", ALL[name])
    engine = Engine.load(tmp_path / "model", settings(**asked))
    assert answer(engine) == alone(plain)
    assert engine.weights == ALL[name].weights


@needs_compiler
@pytest.mark.parametrize("name", ["w8a8", "w8a16"])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])  # whose head is the embedding, and is not
def test_int8_on_a_cpu_is_read_by_the_compiled_step(name, family, tmp_path):
    plain = saved(tmp_path / "model", family, ALL[name])
    engine = Engine.load(tmp_path / "model", settings())
    assert engine.runner.step is not None
    layers = [layer for layer in engine.decoder.layers.modules() if isinstance(layer, torch.nn.Linear)]
    assert {type(layer) for layer in layers} == {Int8Linear}
    assert engine.decoder.head_weight.equal(plain.head_weight)
    assert answer(engine) == alone(plain)


@needs_compiler
@pytest.mark.parametrize("name", ["w4a16", "fp8", *MORE])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_other_codes_are_read_by_the_compiled_step_as_they_are(name, family, tmp_path):
    plain = saved(tmp_path / "model", family, ALL[name])
    engine = Engine.load(tmp_path / "model", settings())
    assert engine.runner.step is not None
    kept = code_layers(models.load(tmp_path / "model"))
    layers = {path: layer for path, layer in engine.decoder.named_modules() if path in kept}
    assert {type(layer) for layer in layers.values()} == {CodedLinear}
    for path, layer in layers.items():
        assert layer.weight.is_meta
        assert all(same(*pair) for pair in zip(layer.kept, kept[path].kept, strict=True)), path
    assert answer(engine) == alone(plain)


@needs_compiler
@pytest.mark.parametrize("name", ["w4a16", "fp8", "int4 groups with zeros"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])  # which the compiled step does not take
def test_codes_stay_codes_operator_by_operator(name, family, tmp_path):
    plain = saved(tmp_path / "model", family, ALL[name])
    engine = Engine.load(tmp_path / "model", settings())
    assert engine.runner.step is None
    coded = code_layers(models.load(tmp_path / "model"))
    assert {type(engine.decoder.get_submodule(path)) for path in coded} == {CodedLinear}
    assert answer(engine) == alone(plain)


@needs_compiler
def test_the_matrix_of_latents_alone_is_unpacked(tmp_path, caplog):
    decoder = tiny.ours("deepseek_v2", hidden_size=64, kv_lora_rank=32, vocab_size=VOCABULARY)
    layer = decoder.layers[1].attention
    for linear in (layer.qkv, layer.kv_up):
        quantise_linear(linear, ALL["w8a16"])
        linear.code_zero = torch.zeros_like(
            linear.code_scale, dtype=torch.int8
        )  # so that it is not int8 as W8A16 has it
    plain = with_numbers(decoder)
    take_int8(decoder), take_codes(decoder), unpack_codes(decoder)
    assert (type(layer.qkv), type(layer.kv_up)) == (CodedLinear, Linear)
    assert caplog.messages[-1].endswith("attention over latents takes the whole matrix in every step")
    with torch.no_grad():
        torch.testing.assert_close(decoder(tiny.ids()), plain(tiny.ids()))


def test_int8_with_zero_points_is_not_taken_for_int8_without(tmp_path):
    plain = saved(
        tmp_path / "model", "smollm2", Scheme("int8", symmetric=False)
    )  # one scale for an output, as w8a16 has
    engine = Engine.load(tmp_path / "model", settings())
    layers = [layer for layer in engine.decoder.layers.modules() if isinstance(layer, torch.nn.Linear)]
    assert Int8Linear not in {type(layer) for layer in layers}
    with torch.no_grad():
        torch.testing.assert_close(engine.decoder(tiny.ids()), plain(tiny.ids()))


@pytest.mark.parametrize("why", ["no compiler", "groups"])
def test_codes_that_cannot_be_read_are_unpacked_and_why_is_said(why, tmp_path, monkeypatch, caplog):
    if why == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        scheme, said = ALL["int4 groups with zeros"], "there is no no-such-compiler to compile it"
    else:
        scheme, said = Scheme("int8", 8), "groups of codes must be multiples of 16, not 8"
    plain = saved(tmp_path / "model", "smollm2", scheme)
    engine = Engine.load(tmp_path / "model", settings())
    warned = [message for message in caplog.messages if message.startswith(f"codes of {scheme.weights} are unpacked to float32")]  # fmt: skip
    assert [message.rpartition(": ")[2] for message in warned] == [said] or (
        why == "groups" and build.missing_compiler()
    )
    layers = [layer for layer in engine.decoder.layers.modules() if isinstance(layer, torch.nn.Linear)]
    assert {type(layer) for layer in layers} == {Linear}
    assert all(layer.codes is None and not layer.weight.is_meta for layer in layers)
    assert engine.weights == scheme.weights
    assert answer(engine) == alone(plain)


@pytest.mark.parametrize("name", ["w8a8", "w4a16", "fp8"])
def test_adapters_lie_beside_codes(name, tmp_path):
    plain = saved(tmp_path / "model", "smollm2", ALL[name])
    adapted = with_numbers(models.load(tmp_path / "model"))
    add_lora(adapted, ["*.qkv", "*.down"], rank=2, alpha=4.0)
    torch.manual_seed(1)
    for _, parameter in lora_parameters(adapted):
        torch.nn.init.normal_(parameter, std=0.3)
    save_adapters(adapted, tmp_path / "adapter")
    engine = Engine.load(tmp_path / "model", settings(adapters={"a": tmp_path / "adapter"}))
    assert answer(engine) == alone(plain)
    load_adapters(plain, tmp_path / "adapter")
    assert answer(engine, "a") == alone(plain) != answer(engine)


def test_a_quantised_model_drafts(tmp_path):
    plain = saved(tmp_path / "model", "smollm2", ALL["w4a16"])
    saved(tmp_path / "draft", "smollm2", ALL["w8a8"])
    engine = Engine.load(tmp_path / "model", settings(speculate=str(tmp_path / "draft")))
    assert answer(engine) == alone(plain)
    assert engine.stats().accepted > 0


def test_what_goes_with_no_codes_is_refused(tmp_path):
    saved(tmp_path / "model", "smollm2", ALL["w4a16"])
    with pytest.raises(ValueError, match=r"model are codes of int4 already; leave weights out"):
        Engine.load(tmp_path / "model", settings(weights="int8"))
    saved(tmp_path / "int8", "smollm2", ALL["w8a8"])
    stays = "weights are codes" if not build.missing_compiler() else "this one is quantised"
    for name, why in dict(model=stays, int8="this one is quantised").items():
        with pytest.raises(ValueError, match=f"no batch-invariant mode: .*{why}"):
            Engine.load(tmp_path / name, settings(batch_invariant=True))


def test_an_engine_tells_what_the_weights_are(tmp_path, caplog):
    saved(tmp_path / "model", "smollm2", ALL["int4 groups with zeros"])
    caplog.set_level(logging.INFO, "tilestack.engine")
    engine = Engine.load(tmp_path / "model", settings())
    assert engine.weights == "int4"
    assert f"the weights of {tmp_path / 'model'} are {engine.weights}" in caplog.messages
    caplog.clear()
    saved(tmp_path / "other", "smollm2", ALL["w8a8"])
    assert Engine.load(tmp_path / "other", settings()).weights == "int8"
    assert not any("unpacked" in message for message in caplog.messages)
    assert Engine(tiny.ours("smollm2"), None, settings()).weights == "float32"
