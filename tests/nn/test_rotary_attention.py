"""nn.Attention is transformers' attention with its weights, row by row and with a cache."""

import copy

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from tilestack.nn import Attention

SIZES = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
FAMILIES = {
    "Llama": (LlamaAttention, transformers.LlamaConfig, {}, {}),
    "Llama 3": (
        LlamaAttention,
        transformers.LlamaConfig,
        dict(rope_parameters=LLAMA3 | dict(rope_theta=500.0)),
        dict(rope_base=500.0, rope_scaling=LLAMA3),
    ),
    "Qwen2": (Qwen2Attention, transformers.Qwen2Config, {}, dict(bias=True)),
    "Qwen3": (Qwen3Attention, transformers.Qwen3Config, dict(head_dim=16), dict(qk_norm=True)),
}


def pair(family, dtype=torch.float32):
    """(theirs, as a function of x, and ours) with the same weights."""
    torch.manual_seed(0)
    kind, config, theirs, ours = FAMILIES[family]
    config = config(**SIZES, **theirs, attn_implementation="sdpa")
    module = kind(config, 0)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    layer = Attention(32, 4, 2, module.head_dim, **ours, positions=64)
    assert not any(layer.load_state_dict(module.state_dict()))
    module, layer, rotary = module.to(dtype), layer.to(dtype), LlamaRotaryEmbedding(config)
    angles = lambda x: tuple(each.to(x.dtype) for each in rotary(x.float(), torch.arange(x.shape[1])[None]))
    return module, lambda x: module(x, position_embeddings=angles(x), attention_mask=None)[0], layer


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_transformers_give_its_results_and_gradients(family, as_good_as):
    x = torch.randn(2, 11, 32)
    module, theirs, ours = pair(family)
    _, truth, _ = pair(family, torch.float64)
    as_good_as(ours(x), theirs(x), truth(x.double()))
    names = [name for name, _ in module.named_parameters()]
    for layer, results in ((module, theirs), (ours, ours)):
        results(x).square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    for name in names:
        torch.testing.assert_close(ours.get_parameter(name).grad, module.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, dict(qk_norm=True), dict(rope_base=None), dict(window=3), dict(softcap=2.0)], ids=str
)
@pytest.mark.parametrize("chunks", [[7], [3, 4], [1] * 7], ids=str)
def test_a_cache_goes_on_where_it_ended(options, chunks):
    torch.manual_seed(0)
    layer, x = Attention(16, 4, 2, **options), torch.randn(2, 7, 16)
    with torch.no_grad():
        expected, cache = layer(x), layer.new_cache(2, 7)
        found = torch.cat([layer(part, cache=cache) for part in x.split(chunks, 1)], 1)
    torch.testing.assert_close(found, expected)
    assert cache.length == 7


def test_a_call_that_was_refused_left_the_cache_as_it_was():
    layer, x = Attention(32, 4, 2).eval(), torch.randn(2, 7, 32)
    with torch.no_grad():
        expected, cache = layer(x), layer.new_cache(2, 7)
        layer(x[:, :5], cache=cache)
        with pytest.raises(ValueError, match="bias must be"):
            layer(x[:, 5:], torch.ones(2, 1, 2, 2, dtype=torch.bool), cache=cache)  # of the new keys alone
        assert cache.length == 5
        found = layer(x[:, 5:], cache=cache)
    torch.testing.assert_close(found, expected[:, 5:])


def test_rows_of_other_lengths_are_padded_on_the_left():
    torch.manual_seed(0)
    layer, x, padding = Attention(16, 4, 2), torch.randn(2, 6, 16), torch.tensor([0, 2])
    seen = torch.arange(6) >= padding[:, None]
    places = (torch.arange(6) - padding[:, None]).clamp(min=0)
    x[1, :2] = 1e4  # nobody sees it
    with torch.no_grad():
        found = layer(x, seen[:, None, None], positions=places)
        torch.testing.assert_close(found[0], layer(x[:1])[0])
        torch.testing.assert_close(found[1, 2:], layer(x[1:, 2:])[0])
        cache = layer.new_cache(2, 6)
        layer(x[:, :5], seen[:, None, None, :5], positions=places[:, :5], cache=cache)
        last = layer(x[:, 5:], seen[:, None, None], positions=places[:, 5:], cache=cache)
    torch.testing.assert_close(last, found[:, 5:])


def test_documents_do_not_see_each_other():
    torch.manual_seed(0)
    layer, x = Attention(16, 4, 2), torch.randn(1, 9, 16)
    places = torch.cat([torch.arange(4), torch.arange(5)])
    found = layer(x, positions=places, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1))


def test_only_relative_places_count_and_only_part_of_a_head_may_turn():
    torch.manual_seed(0)
    for options in (dict(), dict(rotary_dim=2), dict(interleaved=True)):
        layer, x = Attention(16, 4, 2, **options), torch.randn(1, 5, 16)
        torch.testing.assert_close(layer(x, positions=torch.arange(40, 45)), layer(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(layer(x, positions=torch.arange(0, 10, 2)), layer(x), atol=1e-4)


def test_a_row_beyond_the_tables_makes_them_grow():
    layer, longer = (Attention(16, 4, 2, positions=n) for n in (4, 64))
    longer.load_state_dict(layer.state_dict())
    x = torch.randn(1, 20, 16)
    torch.testing.assert_close(layer(x), longer(x))


def test_it_is_copied_cast_and_seen_both_ways():
    layer, x = Attention(16, 4, 2, causal=False), torch.randn(1, 5, 16)
    torch.testing.assert_close(layer(x.flip(1), positions=torch.arange(4, -1, -1)).flip(1), layer(x))
    half = copy.deepcopy(layer).bfloat16()
    assert half.rotary.cos.dtype == torch.float32
    assert half.new_cache(1, 3).keys.dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), layer(x), rtol=0.05, atol=0.02)


def test_weights_are_dropped_while_it_trains():
    layer, x = Attention(16, 4, 2, dropout=0.5), torch.randn(1, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Attention(30, 4), "say what head_dim is"),
        (lambda: Attention(32, 4, 3), "multiple of kv_heads"),
        (lambda: cached(1, 3, tokens=4), "4 more do not fit"),
        (lambda: cached(2, 9, tokens=4), "batch of 2, not 1"),
        (lambda: cached(1, 9, tokens=4, grad=True), "keeps no gradients"),
        (lambda: cached(1, 9, tokens=4, cu_seqlens=torch.tensor([0, 4])), "documents"),
    ],
    ids=["no head_dim", "kv heads", "full", "batch", "gradients", "documents"],
)
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def cached(batch, capacity, tokens, grad=False, **options):
    layer = Attention(16, 4, 2)
    with torch.set_grad_enabled(grad):
        layer(torch.randn(1, tokens, 16), cache=layer.new_cache(batch, capacity), **options)
