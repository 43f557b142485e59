"""Latent attention of DeepSeek's own head sizes through our kernels: spelt out, as training has it, and absorbed, in pages."""

import itertools

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.contract import backend
from tilestack.models.paged import block_tables_of

# Of DeepSeek-V3, but for fewer heads and a smaller model: queries and keys of 128 + 64, values of 128, latents of 512.
SIZES = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, num_attention_heads=3, num_hidden_layers=1)  # fmt: skip
KERNELS = dict(attention="triton", paged_attention="triton", kv_write="triton")
LENGTHS = (27, 3)
# New tokens of both sequences in each forward: prompts in chunks beside decoding.
STEPS = [(17, 2), (1, 0), (8, 1), (1, 0)]


def decoder_of(**options):
    return tiny.ours("deepseek_v2", **SIZES | dict(num_key_value_heads=3) | options)


@torch.no_grad()
def in_pages(decoder, texts, dtype=torch.float32, **options):
    """The logits of texts that are read in chunks, side by side, over one pool of latents."""
    cache = models.PagedCache(decoder.config, 9, 4, dtype, **options)
    assert cache.keys.shape[3:] == (1, 576)
    assert cache.values is None
    cache.keys.fill_(torch.nan if cache.keys.is_floating_point() and cache.key_scale is None else 0)
    table, done, found = block_tables_of([[5, 2, 8, 1, 7, 6, 4], [3]]), (0, 0), ([], [])
    for new in STEPS:
        start, done = done, tuple(map(sum, zip(done, new, strict=True)))
        ids = torch.cat([text[first:last] for text, first, last in zip(texts, start, done, strict=True)])
        ends = torch.tensor(list(itertools.accumulate(new, initial=0)), dtype=torch.int32)
        batch = models.PagedBatch(cache, table, torch.tensor(done, dtype=torch.int32), ends, len(ids), max(new))
        for kept, part in zip(found, decoder(ids, context=batch).split(list(new)), strict=True):
            kept.append(part)
    assert done == LENGTHS
    return [torch.cat(parts) for parts in found]


@torch.no_grad()
def test_small_latents_are_normed_as_transformers_does(tmp_path):
    """So small that the eps of their norms has a say, which is not the model's."""
    theirs, ids = tiny.theirs("deepseek_v2"), tiny.ids()
    for layer in theirs.model.layers:
        layer.self_attn.q_a_proj.weight *= 1e-3
        layer.self_attn.kv_a_proj_with_mqa.weight *= 1e-3
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(models.load(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(rope_scaling=tiny.YARN)], ids=["plain", "yarn"])
def test_absorbed_in_pages_is_what_is_spelt_out(options):
    decoder = decoder_of(**options)
    texts = [text[:length] for text, length in zip(tiny.ids(2, max(LENGTHS)), LENGTHS, strict=True)]
    with torch.no_grad(), backend(attention="torch"):
        expected = [decoder(text[None])[0] for text in texts]
    for chosen in ({}, KERNELS):
        with backend(**chosen):
            for found, whole in zip(in_pages(decoder, texts), expected, strict=True):
                torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("code_queries", [False, True])
def test_latents_as_codes_are_nearly_the_numbers(code_queries):
    decoder = decoder_of()
    texts = [text[:length] for text, length in zip(tiny.ids(2, max(LENGTHS)), LENGTHS, strict=True)]
    exact = torch.cat(in_pages(decoder, texts))
    with backend(**KERNELS):
        found = torch.cat(in_pages(decoder, texts, torch.int8, code_queries=code_queries))
    assert 1e-5 < (found - exact).norm() / exact.norm() < 0.03


def test_gradients_by_our_kernels_are_those_of_the_definition():
    """Of packed documents, whose heads of queries and of values have two sizes."""
    decoder, ids = decoder_of(), tiny.ids(tokens=10)
    ends = torch.tensor([0, 4, 10, 20], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(length)) for length in ends.diff()]).view(2, 10)
    gradients = []
    for chosen in ("torch", "triton"):
        decoder.zero_grad()
        with backend(attention=chosen):
            decoder(ids, positions, ends).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in decoder.named_parameters()})
    expected, found = gradients
    assert expected["layers.0.attention.kv_up.weight"].abs().max() > 0
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 + 1e-4 * float(gradient.abs().max()))
