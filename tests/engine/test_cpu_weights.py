"""Weights packed for a CPU: in blocks the same numbers, in 8 bits close to them."""

import copy

import pytest
import tiny_models as tiny
import torch

from tilestack import models, ops
from tilestack.engine import LLM, Engine, EngineSettings, SamplingParams
from tilestack.engine.cpu_weights import CodedLinear, can_block, pack_for_cpu
from tilestack.kernels.cpu import build
from tilestack.nn import Linear
from tilestack.quant import SCHEMES
from tilestack.quant.linear import quantise_linear

needs_compiler = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "deepseek_v2", "gemma3"])
@pytest.mark.parametrize("tokens", [1, 5])
@torch.no_grad()
def test_blocks_hold_the_same_numbers(family, tokens):
    if not can_block():
        pytest.skip("this CPU has no kernels for bfloat16 in blocks")
    plain = tiny.ours(family).bfloat16()
    packed = copy.deepcopy(plain)
    pack_for_cpu(packed, "bfloat16")
    ids = tiny.ids(tokens=tokens)
    torch.testing.assert_close(packed(ids), plain(ids), rtol=0.05, atol=0.05)
    truth = copy.deepcopy(plain).double()(ids)
    assert (packed(ids) - truth).norm() <= 1.5 * (plain(ids) - truth).norm()


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "llama_biased"])
@torch.no_grad()
def test_eight_bits_are_as_far_off_as_their_rounding(family):
    plain = tiny.ours(family)
    packed = copy.deepcopy(plain)
    pack_for_cpu(packed, "int8")
    ids = tiny.ids(tokens=9)
    found, truth = packed(ids), plain(ids)
    cosine = torch.nn.functional.cosine_similarity(found.flatten(0, 1), truth.flatten(0, 1), dim=-1)
    assert float(cosine.mean()) > 0.999  # what one layer may be off is in the test below
    assert not torch.equal(found, truth)
    assert (
        sum(
            parameter.numel()
            for parameter in packed.parameters()
            if parameter.device.type == "cpu" and parameter.ndim > 1
        )
        == plain.embedding.weight.numel()
    )


@pytest.mark.parametrize("columns", [24, 64, 80, 192])  # of some, PyTorch's kernel for codes leaves out the rest
def test_one_layer_in_eight_bits_by_hand(columns):
    from tilestack.engine.cpu_weights import pack_int8

    torch.manual_seed(0)
    layer = Linear(columns, 7)
    weight, bias, x = layer.weight.detach().clone(), layer.bias.detach().clone(), torch.randn(3, columns)
    pack_int8(layer)
    scale = weight.abs().amax(1, keepdim=True) / 127
    by_hand = x @ ((weight / scale).round() * scale).T + bias
    torch.testing.assert_close(layer(x), by_hand, rtol=1e-4, atol=1e-5)
    few = layer.bfloat16()(x.bfloat16())
    assert (few - by_hand).norm() <= 0.01 * by_hand.norm()


def test_engines_take_them(tmp_path):
    models.save(tiny.ours("smollm2", vocab_size=300), tmp_path / "model")
    from tilestack.data import Tokenizer

    Tokenizer.train(["a b c d e f g " * 30], 300).save(tmp_path / "model")
    for settings in (EngineSettings(weights="int8"), EngineSettings(dtype="bfloat16")):
        llm = LLM(Engine.load(tmp_path / "model", settings))
        output = llm.generate([3, 5, 7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        assert len(output.completions[0].ids) == 5


@needs_compiler
@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(2, 3), (5, 13)])  # a few, and as many as a GPU would quantise for fp8
@torch.no_grad()
def test_a_layer_of_codes_is_as_exact_as_the_definition(scheme, dtype, rows):
    torch.manual_seed(0)
    layer = Linear(96, 40).to(dtype)
    quantise_linear(layer, SCHEMES[scheme])
    layer.__class__ = CodedLinear
    x = torch.randn(*rows, 96).to(dtype)
    truth = ops.linear_weight_only(x.double(), *layer.kept, layer.bias)
    by_definition = ops.linear_weight_only(x, *layer.kept, layer.bias)
    assert layer(x).dtype == dtype
    assert (layer(x) - truth).norm() <= 1.1 * (by_definition - truth).norm()
