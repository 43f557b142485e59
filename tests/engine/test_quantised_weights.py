"""Weights of 8 and 4 bits: an engine says what the model would whose weights are the numbers that the codes stand for."""

import copy

import pytest
import tiny_models as tiny
import torch
from engines import check_empty, greedy, serve

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, SamplingParams, quantised_weights
from tilestack.engine.quantised_weights import quantise_layer, quantise_weights, refuse_weights
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.models.adapters import AdapterError, load_adapters, save_adapters
from tilestack.nn import Linear
from tilestack.nn.lora import add_lora, lora_parameters
from tilestack.quant import SCHEMES, Scheme
from tilestack.quant.linear import FEW, QuantisedLinear, quantise_linear

VOCABULARY = 300
PROMPT = [3, 5, 7, 11, 13, 3, 5, 7, 11]
HALVES_AND_MORE = [torch.float32, torch.bfloat16, torch.float16]


def rounded(weight, format):
    """The numbers that codes of a weight stand for, by hand."""
    largest, groups = dict(fp8=(448, 1), int8=(127, 1), int4=(7, weight.shape[1] // 32))[format]
    parts = weight.float().unflatten(1, (groups, -1))
    scale = parts.abs().amax(-1, keepdim=True) / largest
    codes = (parts / scale).to(torch.float8_e4m3fn).float() if format == "fp8" else (parts / scale).round()
    return (codes * scale).flatten(1)


def with_rounded_weights(decoder, format):
    """A decoder of plain layers with the numbers of the other's codes."""
    decoder = copy.deepcopy(decoder)
    for layer in decoder.layers.modules():
        if type(layer) is Linear:
            layer.weight.data = rounded(layer.weight.data, format).to(layer.weight.dtype)
    return decoder


def made(family):
    """A decoder whose layers have rows of whole groups of 32 numbers, and of no larger ones."""
    return tiny.ours(family, vocab_size=VOCABULARY, intermediate_size=96, hidden_size=96, head_dim=24)


def saved(folder, family="smollm2"):
    decoder = made(family)
    models.save(decoder, folder)
    Tokenizer.train(["a b c d e f g " * 30], VOCABULARY).save(folder)
    return decoder


def settings(**asked):
    return EngineSettings(**(dict(device="cpu", dtype="float32", page=4, kv_memory=1 << 22) | asked))


def alone(decoder, prompt, count):
    return [int(step[0]) for step in models.generate(decoder, torch.tensor([prompt]), max_new_tokens=count)]


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3", "llama_biased", "gemma3"])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_those_of_the_model_with_rounded_weights(family, format, graphs):
    plain = made(family)
    decoder = copy.deepcopy(plain)
    quantise_weights(decoder, format)
    engine = Engine(decoder, None, settings(weights=format, graphs=graphs, step_tokens=16))
    prompts = {name: PROMPT[:count] * 3 for name, count in zip("abc", (4, 9, 2), strict=True)}
    found = serve(engine, [greedy(name, prompt, 12) for name, prompt in prompts.items()])
    exact = with_rounded_weights(plain, format)
    assert found == {name: [alone(exact, prompt, 12)] for name, prompt in prompts.items()}
    assert not torch.equal(decoder(torch.tensor([PROMPT])), plain(torch.tensor([PROMPT])))
    check_empty(engine)


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_a_model_is_served_by_its_folder(format, tmp_path):
    plain = saved(tmp_path / "model", "qwen3")  # whose head is not its embedding
    llm = LLM(tmp_path / "model", settings(weights=format))
    output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.completions[0].ids == alone(with_rounded_weights(plain, format), PROMPT, 8)
    decoder = llm.engine.decoder
    assert type(decoder.head) is Linear
    assert decoder.head.weight.equal(plain.head.weight)
    layers = [layer for layer in decoder.layers.modules() if isinstance(layer, torch.nn.Linear)]
    assert {layer.scheme.weights for layer in layers} == {format}
    exact = with_rounded_weights(plain, format)
    down = decoder.layers[0].mlp.down
    kept = down.weight if down.codes is None else down.kept.numbers()
    assert kept.equal(exact.layers[0].mlp.down.weight)


def test_each_layer_is_made_codes_before_the_next_is_read(monkeypatch, tmp_path):
    saved(tmp_path / "model")
    seen = []

    def noting(path, layer, weights):
        assert all(before.weight.is_meta for before in seen)
        quantise_layer(path, layer, weights)
        seen.extend([layer] if isinstance(layer, QuantisedLinear) else [])

    monkeypatch.setattr(quantised_weights, "quantise_layer", noting)
    Engine.load(tmp_path / "model", settings(weights="fp8"))
    assert len(seen) == 2 * 4


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", HALVES_AND_MORE)
@pytest.mark.parametrize("rows", [1, FEW])
@torch.no_grad()
def test_a_layer_of_few_rows_rounds_weights_alone(format, dtype, rows):
    layer, exact = layer_and_weight(format, dtype)
    x = torch.randn(rows, 96, dtype=dtype)
    assert_product(layer(x), x, exact, layer.bias)


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", HALVES_AND_MORE)
@torch.no_grad()
def test_a_layer_of_many_rows_rounds_them_too_in_fp8_alone(format, dtype):
    layer, exact = layer_and_weight(format, dtype)
    x = torch.randn(5, 13, 96, dtype=dtype)
    met = x.flatten(0, 1)
    assert len(met) == FEW + 1
    if format == "fp8" and dtype != torch.float32:
        met = rounded(met, "fp8")
    assert_product(layer(x).flatten(0, 1), met, exact, layer.bias)


@pytest.mark.parametrize("dtype", HALVES_AND_MORE)
@torch.no_grad()
def test_a_layer_of_w8a8_rounds_many_rows_too(dtype):
    torch.manual_seed(0)
    layer = Linear(96, 40).to(dtype)
    exact = rounded(layer.weight.detach(), "int8").double()
    quantise_linear(layer, SCHEMES["w8a8"])
    x = torch.randn(FEW + 1, 96, dtype=dtype)
    assert_product(layer(x), x if dtype == torch.float32 else rounded(x, "int8"), exact, layer.bias)
    assert_product(layer(x[1:]), x[1:], exact, layer.bias)


@pytest.mark.parametrize("dtype", HALVES_AND_MORE)
@torch.no_grad()
def test_a_layer_of_blocks_rounds_many_rows_by_parts_of_128(dtype):
    """Whose sizes differ by as much as those of the weight's blocks."""
    torch.manual_seed(0)
    layer = Linear(256, 200).to(dtype)
    layer.weight[:128, :128] *= 30
    layer.weight[:, 128:] *= 3e3
    layer.bias *= 1e3
    quantise_linear(layer, Scheme("fp8", 128, activations="fp8", blocks=True))
    exact = layer.kept.numbers().double()
    x = torch.randn(FEW + 1, 256, dtype=dtype)
    x[:, 128:] *= 2e-4  # as much beside such weights, and codes of whole rows would be zeros
    x[3:] *= 50
    met = x if dtype == torch.float32 else rounded(x.reshape(-1, 128), "fp8").view(x.shape)
    assert_product(layer(x), met, exact, layer.bias)
    assert_product(layer(x[1:]), x[1:], exact, layer.bias)


def layer_and_weight(format, dtype):
    """A layer of codes, and the numbers that they stand for."""
    torch.manual_seed(0)
    layer = Linear(96, 40).to(dtype)
    exact = rounded(layer.weight.detach(), format).double()
    quantise_layer("layer", layer, format)
    return layer, exact


def assert_product(found, x, weight, bias):
    """As good as a product in float32 that is rounded once."""
    truth = x.double() @ weight.T + bias.double()
    reference = (x.float() @ weight.float().T + bias.float()).to(found.dtype)
    verdict = judge(found, reference, truth, own_error(reference, truth))
    assert not verdict.message, verdict.message


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_adapters_stand_beside_codes(weights, tmp_path):
    plain = saved(tmp_path / "model")
    for seed, name in enumerate("ab", 1):
        adapted = copy.deepcopy(plain)
        add_lora(adapted, ["*.qkv", "*.down"], rank=2, alpha=4.0)
        torch.manual_seed(seed)
        for _, parameter in lora_parameters(adapted):
            torch.nn.init.normal_(parameter, std=0.3)
        save_adapters(adapted, tmp_path / name)
    engine = Engine.load(
        tmp_path / "model", settings(weights=weights, adapters={name: tmp_path / name for name in "ab"})
    )
    requests = []
    for name in ("a", "b", None):
        requests.append(greedy(f"{name}", PROMPT, 10))
        requests[-1].adapter = name
    found = serve(engine, requests)
    assert len({tuple(answer) for (answer,) in found.values()}) == 3
    for request in requests:
        exact = with_rounded_weights(plain, weights)
        if weights == "int8":  # the head too, on a CPU
            exact.head = Linear(96, VOCABULARY, bias=False)
            exact.head.weight.data = rounded(plain.embedding.weight.data, "int8")
        if request.adapter:
            load_adapters(exact, tmp_path / request.adapter)
        assert found[request.id] == [alone(exact, PROMPT, 10)]


def test_an_adapter_of_a_head_of_codes_is_refused_by_name(tmp_path):
    adapted = saved(tmp_path / "model", "qwen3")
    add_lora(adapted, ["head"], 2, 4.0)
    save_adapters(adapted, tmp_path / "head")
    with pytest.raises(AdapterError, match="adapters of head cannot be chosen per request"):
        Engine.load(tmp_path / "model", settings(weights="int8", adapters={"x": tmp_path / "head"}))


def test_what_cannot_be_had_is_refused_by_name(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="no weights 'int3'; choose from fp8, int8, int4, or leave it out"):
        Engine.load(tmp_path, settings(weights="int3"))
    with pytest.raises(
        ValueError, match=r"rows of a multiple of 32 numbers, and those of layers\.0\.mlp\.down have 80"
    ):
        quantise_weights(tiny.ours("smollm2"), "int4")
    with pytest.raises(ValueError, match="weights of fp8 are made as a model is loaded"):
        Engine(tiny.ours("smollm2"), None, settings(weights="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        ValueError, match=r"fp8 need compute capability 8\.9, and this GPU has 8\.6; int8 takes as much"
    ):
        refuse_weights("fp8", torch.device("cuda"))
    refuse_weights("int8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    refuse_weights("fp8", torch.device("cuda"))
