"""The decoder by itself: the cache, packed documents, gradients, compilation, dtypes and how it is initialised."""

import itertools

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.nn import MoE

each_family = pytest.mark.parametrize("family", tiny.FAMILIES)
some_families = pytest.mark.parametrize(
    "family",
    ["llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v2_lite"]
    + ["gemma2", "gemma3", "phi4_mini", "olmo2", "granite", "glm4"],
)


@torch.no_grad()
@each_family
def test_reading_in_pieces_with_a_cache_is_reading_at_once(family):
    tokens = 14  # of dynamic RoPE, whose angles change once a text is longer than 16, as in transformers
    decoder, ids = tiny.ours(family), tiny.ids(tokens=tokens)
    cache = models.KVCache(decoder.config, 2, tokens)
    found = [decoder(piece, context=cache) for piece in ids.split([5, 1, 1, 6, 1], dim=1)]
    assert cache.length == tokens
    torch.testing.assert_close(torch.cat(found, 1), decoder(ids), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@some_families
def test_packed_documents_are_as_if_read_alone(family):
    decoder, ids = tiny.ours(family), tiny.ids(tokens=12)
    ends = torch.tensor([0, 3, 12, 13, 20, 24, 24, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in ends.diff()]).view(2, 12)
    packed = decoder(ids, positions, ends).flatten(0, 1)
    for start, end in itertools.pairwise(ends[:6]):
        alone = decoder(ids.flatten()[None, start:end])[0]
        torch.testing.assert_close(packed[start:end], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v2", "gemma3"])
def test_computing_activations_again_changes_no_gradient(family):
    decoder, ids = tiny.ours(family), tiny.ids()
    gradients = []
    for decoder.checkpointing in (False, True):
        decoder.zero_grad()
        decoder(ids).square().mean().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2_lite", "gemma3"])
def test_it_compiles_whole(family):
    decoder, ids = tiny.ours(family, num_hidden_layers=1), tiny.ids(tokens=8)
    ends = torch.tensor([0, 5, 8, 12, 16, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in ends.diff()]).view(2, 8)
    torch.compiler.reset()
    results = []
    for function in (decoder.hidden, torch.compile(decoder.hidden, fullgraph=True, backend="aot_eager")):
        decoder.zero_grad()
        out = function(ids, positions, ends)
        out.square().mean().backward()
        results.append([out, *(p.grad for p in decoder.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["smollm2", "qwen3_moe", "deepseek_v2", "gemma2", "gemma3", "olmo2", "glm4"])
def test_half_precision_and_autocast_stay_near_float32(family):
    decoder, ids = tiny.ours(family), tiny.ids()
    expected = decoder(ids)
    with torch.autocast("cpu", torch.bfloat16):
        cast = decoder(ids)
        cached = decoder(ids, context=models.KVCache(decoder.config, 2, 24))
    half = decoder.to(torch.bfloat16)(ids)
    assert half.dtype == cast.dtype == torch.bfloat16
    assert decoder.rotary.whole.cos.dtype == torch.float32, "angles of far positions need their digits"
    for found in (cast, cached, half):
        # Routing may send a token elsewhere after rounding, so the middle of the errors is judged, not the largest.
        assert (found - expected).abs().median() < 0.02 * expected.std()


@torch.no_grad()
def test_gemma_rounds_its_embedding_scale_and_not_its_norm_weights():
    """As it was trained: the factor is one of the model's dtype, and 1 + w is made in float32."""
    decoder, ids = tiny.ours("gemma2", hidden_size=72).bfloat16(), tiny.ids()
    assert float(torch.tensor(72**0.5, dtype=torch.bfloat16)) == 8.5
    assert torch.equal(decoder.embedded(ids), (decoder.embedding.weight[ids].float() * 8.5).bfloat16())

    decoder.norm.weight.fill_(2**-8 - 2**-12)  # which 1 + w in bfloat16 loses
    assert torch.equal(decoder.norm.scale, 1 + decoder.norm.weight.float())


def test_mixtures_tell_their_balance():
    decoder = tiny.ours("qwen3_moe")
    assert decoder.balances() == []
    decoder(tiny.ids())
    (balance,) = decoder.balances()
    assert isinstance(decoder.layers[1].mlp, MoE)
    assert int(balance.tokens_per_expert.sum()) == 2 * 24 * 2


def test_a_forward_that_is_repeated_for_gradients_leaves_the_balance_of_the_first():
    """The repetition's would keep alive the activations that were to be let go."""
    decoder = tiny.ours("deepseek_v2")  # of whose mixtures more is repeated than the choice of experts
    decoder.checkpointing = True
    out = decoder(tiny.ids())
    (before,) = decoder.balances()
    out.square().mean().backward()
    assert decoder.balances()[0] is before


@pytest.mark.parametrize("experts", [{}, dict(experts=4, top_k=2, expert_intermediate=64, shared_intermediate=64)])
def test_initial_weights_are_small_and_smaller_where_they_add_up(experts):
    sizes = dict(layers=8, heads=4, kv_heads=2, head_dim=64) | experts
    config = models.ModelConfig(1000, 256, 512, qkv_bias=True, tied=True, **sizes)
    decoder = models.Decoder(config)
    assert decoder.head_weight is decoder.embedding.weight
    stds = {
        name: float(parameter.detach().std()) for name, parameter in decoder.named_parameters() if parameter.ndim > 1
    }
    for name, std in stds.items():
        expected = 0.02 / 4 if "output" in name or "down" in name else 0.02
        assert std == pytest.approx(expected, rel=0.05), name
    assert not decoder.layers[0].attention.qkv.bias.any()
    assert bool((decoder.norm.weight == 1).all())


@torch.no_grad()
def test_tables_grow_with_the_text():
    decoder = tiny.ours("llama2", max_position_embeddings=8)
    ids, before = tiny.ids(tokens=40), decoder.rotary.whole.cos
    long = decoder(ids)
    assert decoder.rotary.whole.cos.shape[0] >= 40
    assert any(cos is before for cos, _ in decoder.rotary.whole.outgrown), "CUDA graphs go on reading them"
    torch.testing.assert_close(long, tiny.ours("llama2")(ids))


def test_a_decoder_from_meta_has_its_tables():
    with torch.device("meta"):
        decoder = models.Decoder(models.ModelConfig.from_hf(tiny.config_of("llama3")))
    decoder.to_empty(device="cpu")
    assert torch.equal(decoder.rotary.whole.cos, tiny.ours("llama3").rotary.whole.cos)


def test_what_does_not_fit_a_cache_is_refused_before_anything_is_stored():
    decoder = tiny.ours("llama2")
    cache = models.KVCache(decoder.config, 2, 10)
    decoder(tiny.ids(tokens=8), context=cache)
    with pytest.raises(ValueError, match="holds 10 tokens and has 8; 3 more do not fit"):
        decoder(tiny.ids(tokens=3), context=cache)
    with pytest.raises(ValueError, match="batch of 2, not 1"):
        decoder(tiny.ids(1, 1), context=cache)
    with pytest.raises(ValueError, match="cu_seqlens are of rows that are read at once"):
        decoder(tiny.ids(tokens=1), cu_seqlens=torch.tensor([0, 1, 2]), context=cache)
    assert cache.length == 8
