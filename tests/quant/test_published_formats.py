"""GPTQ, AWQ and fp8 checkpoints: the codes that are read stand for the numbers that the formats define."""

import pytest
import tiny_models as tiny
import torch
from code_models import SIZES, code_layers, with_numbers
from published import FORMATS, in_words, publish

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, EngineSettings, SamplingParams
from tilestack.models.quantised_config import formats_of, group_arguments
from tilestack.models.weights import unfused
from tilestack.nn import Linear
from tilestack.quant import Scheme
from tilestack.quant.linear import quantise_linear
from tilestack.quant.packing import pack_words, unpack_words, words_of

PROMPT = [3, 5, 7, 11, 13]


def published(folder, name, family="qwen2", **sizes):
    """A folder of codes; what it holds of biases, norms and the rest, and the numbers of its codes."""
    decoder = tiny.ours(family, **SIZES | sizes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    models.save(decoder, folder)
    return decoder, publish(folder, name)


INT8, FP8 = dict(num_bits=8, type="int"), dict(num_bits=8, type="float")


@pytest.mark.parametrize(
    ("format", "weights", "inputs", "scheme"),
    [
        ("int-quantized", INT8, INT8, Scheme("int8", activations="int8")),
        ("int-quantized", INT8 | {"symmetric": None}, INT8, Scheme("int8", activations="int8")),
        ("int-quantized", INT8 | {"symmetric": False}, INT8, Scheme("int8", symmetric=False)),
        ("int-quantized", INT8 | {"group_size": 32}, INT8, Scheme("int8", group=32)),
        ("pack-quantized", INT8 | {"num_bits": 4, "group_size": 32}, INT8, Scheme("int4", group=32)),
        ("int-quantized", INT8, None, Scheme("int8")),
        ("int-quantized", INT8, INT8 | {"num_bits": 4}, Scheme("int8")),
        ("float-quantized", FP8, FP8, Scheme("fp8", activations="fp8")),
        ("float-quantized", FP8, INT8, Scheme("fp8")),
    ],
)
def test_inputs_become_codes_where_there_is_a_product_of_such_codes(format, weights, inputs, scheme):
    groups = {"group_0": {"weights": weights, "input_activations": inputs}}
    given = dict(quant_method="compressed-tensors", format=format, config_groups=groups)
    (found,) = formats_of({"quantization_config": given})
    assert found.scheme == scheme


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        (dict(quant_method="awq"), Scheme("int4", group=128, symmetric=False)),
        (dict(quant_method="awq", w_bit=4, q_group_size=64), Scheme("int4", group=64, symmetric=False)),
        (dict(quant_method="gptq", bits=4, group_size=32), Scheme("int4", group=32)),
        (dict(quant_method="gptq", bits=8), Scheme("int8")),
    ],
)
def test_what_a_configuration_of_codes_leaves_out(given, scheme):
    (found,) = formats_of({"quantization_config": given})
    assert found.scheme == scheme


def test_blocks_are_written_with_inputs_in_groups_as_others_have_them():
    """As compressed-tensors' preset FP8_BLOCK does, and vLLM reads."""
    written = group_arguments(Scheme("fp8", group=128, activations="fp8", blocks=True))
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    assert written["weights"] == numbers | {"strategy": "block", "block_structure": [128, 128], "dynamic": False}
    assert written["input_activations"] == numbers | {"strategy": "group", "group_size": 128, "dynamic": True}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("codes", [1, 3, 4, 7, 8, 9, 17])
def test_words_that_are_not_full_hold_their_codes_too(bits, codes):
    given = torch.randint(2**bits, (3, codes), dtype=torch.uint8)
    words = pack_words(given, bits)
    assert words.shape == (3, words_of(codes, bits))
    each = 32 // bits
    filled = [[*row, *[0] * (-codes % each)] for row in given.tolist()]
    assert torch.equal(words, in_words(filled, bits))
    assert torch.equal(unpack_words(words, bits, codes), given)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen2", "llama_biased", "phi3"])
@torch.no_grad()
def test_codes_stand_for_their_numbers(name, family, tmp_path):
    plain, numbers = published(tmp_path / "model", name, family)
    for weight, tensor in unfused(plain):  # views, so that this changes the decoder
        if weight in numbers:
            tensor.copy_(numbers[weight])
    decoder = models.load(tmp_path / "model")
    assert len(code_layers(decoder)) == 4 * decoder.config.layers
    for (weight, tensor), (_, truth) in zip(unfused(with_numbers(decoder)), unfused(plain), strict=True):
        torch.testing.assert_close(tensor, truth, rtol=1e-6, atol=0, msg=weight)
    torch.testing.assert_close(decoder(tiny.ids()), plain(tiny.ids()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_serves_them(name, tmp_path):
    plain, numbers = published(tmp_path / "model", name, "qwen3", vocab_size=300)
    Tokenizer.train(["a b c d e f g " * 30], 300).save(tmp_path / "model")
    with torch.no_grad():
        for weight, tensor in unfused(plain):
            if weight in numbers:
                tensor.copy_(numbers[weight])
    settings = EngineSettings(device="cpu", dtype="float32", page=4, kv_memory=1 << 22)
    found = LLM(tmp_path / "model", settings).generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    steps = models.generate(plain, torch.tensor([PROMPT]), max_new_tokens=8)
    assert found.completions[0].ids == [int(step[0]) for step in steps]


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_what_was_read_is_written_as_compressed_tensors(name, tmp_path):
    published(tmp_path / "model", name)
    decoder = models.load(tmp_path / "model")
    models.save(decoder, tmp_path / "again")
    again = models.load(tmp_path / "again")
    for one, other in zip(code_layers(decoder).values(), code_layers(again).values(), strict=True):
        assert all(a is b or a.equal(b) for a, b in zip(one.kept, other.kept, strict=True))


@torch.no_grad()
def test_blocks_of_a_fused_layer_are_multiplied_as_codes_where_they_lie_in_one_grid(tmp_path):
    """And where they do not, as with 96 rows of gate and of up, the weights alone are codes."""
    whole = dict(hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=4)
    published(tmp_path / "model", "fp8 by DeepSeek", "qwen3", intermediate_size=192, **whole)
    layers = code_layers(models.load(tmp_path / "model", dtype=torch.bfloat16))
    qkv, gate_up = layers["layers.0.attention.qkv"], layers["layers.0.mlp.gate_up"]
    assert qkv.product_scale.shape == (3, 1)
    assert gate_up.product_scale is None
    part_of_a_block = Linear(128, 200)
    quantise_linear(part_of_a_block, qkv.scheme)
    assert part_of_a_block.product_scale.shape == (2, 1)
    x = torch.randn(70, 128)
    for layer in (qkv, gate_up):
        few, many = layer(x[:5].bfloat16()), layer(x.bfloat16())[:5]
        assert (many - few).norm() < 0.05 * few.norm()
    assert gate_up(x.bfloat16())[:5].equal(gate_up(x[:5].bfloat16()))
    assert not qkv(x.bfloat16())[:5].equal(qkv(x[:5].bfloat16()))
