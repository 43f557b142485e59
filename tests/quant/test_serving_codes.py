"""Engines of quantised checkpoints say what the plain model says that has the numbers of the codes."""

import logging

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, quantised, with_numbers

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, SamplingParams
from tilestack.engine.cpu_weights import Int8Linear
from tilestack.kernels.cpu import build
from tilestack.models.adapters import load_adapters, save_adapters
from tilestack.nn import Linear
from tilestack.nn.lora import add_lora, lora_parameters
from tilestack.quant import Scheme

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


def test_int8_with_zero_points_is_not_taken_for_int8_without(tmp_path):
    plain = saved(
        tmp_path / "model", "smollm2", Scheme("int8", symmetric=False)
    )  # one scale for an output, as w8a16 has
    engine = Engine.load(tmp_path / "model", settings())
    assert {type(layer) for layer in engine.decoder.layers.modules() if isinstance(layer, torch.nn.Linear)} == {Linear}
    with torch.no_grad():
        torch.testing.assert_close(engine.decoder(tiny.ids()), plain(tiny.ids()))


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
    for name in ("model", "int8"):
        with pytest.raises(ValueError, match=r"no batch-invariant mode: .* this one is quantised"):
            Engine.load(tmp_path / name, settings(batch_invariant=True))


def test_an_engine_tells_what_the_weights_are(tmp_path, caplog):
    saved(tmp_path / "model", "smollm2", ALL["int4 groups with zeros"])
    caplog.set_level(logging.INFO, "tilestack.engine")
    engine = Engine.load(tmp_path / "model", settings())
    assert engine.weights == "int4"
    assert f"the weights of {tmp_path / 'model'} are {engine.weights}" in caplog.messages
    assert any("codes of int4 are unpacked to float32" in message for message in caplog.messages)
    layers = [layer for layer in engine.decoder.layers.modules() if isinstance(layer, torch.nn.Linear)]
    assert {type(layer) for layer in layers} == {Linear}
    assert all(layer.codes is None and not layer.weight.is_meta for layer in layers)
    assert bool(build.missing_compiler()) or engine.runner.step is not None
    caplog.clear()
    saved(tmp_path / "other", "smollm2", ALL["w8a8"])
    assert Engine.load(tmp_path / "other", settings()).weights == "int8"
    assert not any("unpacked" in message for message in caplog.messages)
    assert Engine(tiny.ours("smollm2"), None, settings()).weights == "float32"
