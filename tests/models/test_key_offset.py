"""What keys have in common, taken off before they become codes: less is lost, and no model is given what it cannot take."""

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models.key_offset import calibrate_key_offset
from tilestack.models.paged import block_tables_of

PAGE, PAGES = 4, 16
FAR = 60.0


def with_far_channels():
    """A model whose keys have a bias in the channels that turn slowly, as Qwen's do; in each layer a larger one."""
    decoder = tiny.ours("qwen2")
    config = decoder.config
    first = config.heads * config.head_dim
    half = config.head_dim // 2
    with torch.no_grad():
        for number, layer in enumerate(decoder.layers, 1):
            keys = layer.attention.qkv.bias[first : first + config.kv_heads * config.head_dim].view(config.kv_heads, -1)
            keys[:, half - 1] += FAR * number
            keys[:, -1] -= FAR * number
    return decoder


@torch.no_grad()
def logits_of(decoder, ids, dtype=torch.float32, calibrated=False, **options):
    cache = models.PagedCache(decoder.config, PAGES, PAGE, dtype, **options)
    if calibrated:
        calibrate_key_offset(decoder, cache)
    found, table = [], block_tables_of([[3, 1, 4, 2, 7, 6]])
    for length, new in ((18, 18), (19, 1), (23, 4)):
        ends = torch.tensor([0, new], dtype=torch.int32)
        batch = models.PagedBatch(cache, table, torch.tensor([length], dtype=torch.int32), ends, new, new)
        found.append(decoder(ids[length - new : length], context=batch))
    return torch.cat(found)


@pytest.mark.parametrize("code_queries", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_far_channels_cost_fewer_digits(dtype, code_queries):
    decoder, ids = with_far_channels(), tiny.ids(1, 23)[0]
    exact = logits_of(decoder, ids)
    error = lambda found: float((found - exact).norm() / exact.norm())
    rough, smooth = (
        error(logits_of(decoder, ids, dtype, calibrated, code_queries=code_queries)) for calibrated in (False, True)
    )
    assert 0 < smooth < rough / 2


def test_the_offset_is_the_mean_key():
    decoder = with_far_channels()
    cache = models.PagedCache(decoder.config, PAGES, PAGE, torch.int8)
    calibrate_key_offset(decoder, cache)
    offset, half = cache.key_offset, decoder.config.head_dim // 2
    assert offset.shape == (decoder.config.layers, decoder.config.kv_heads, decoder.config.head_dim)
    assert offset.dtype == torch.float32
    far = FAR * torch.arange(1, decoder.config.layers + 1)[:, None]
    assert ((offset[:, :, half - 1] - far).abs() < far / 10).all()
    assert ((offset[:, :, -1] + far).abs() < far / 10).all()
    near = [channel for channel in range(2 * half) if channel not in (half - 1, 2 * half - 1)]
    assert offset[:, :, near].abs().max() < FAR / 10
    again = models.PagedCache(decoder.config, PAGES, PAGE, torch.int8)
    calibrate_key_offset(decoder, again)
    assert torch.equal(again.key_offset, offset)


def test_keys_lose_it_whichever_way_they_come():
    """Turned by whoever calls, as latents are, or on the way into their pages."""
    decoder = with_far_channels()
    config, tokens, layer = decoder.config, 5, decoder.layers[1].attention.layer
    heads = torch.randn(1, tokens, config.heads + 2 * config.kv_heads, config.head_dim) + FAR
    q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), 2)
    still = torch.ones(tokens, config.head_dim // 2), torch.zeros(tokens, config.head_dim // 2)  # angles of zero
    written = []
    for attend in (
        lambda batch: batch.attend(layer, q, k, v),
        lambda batch: batch.attend_heads(layer, heads, config.heads, still, None, 1e-6, False),
    ):
        cache = models.PagedCache(config, PAGES, PAGE, torch.int8)
        calibrate_key_offset(decoder, cache)
        ends = torch.tensor([0, tokens])
        attend(models.PagedBatch(cache, block_tables_of([[3, 1]]), torch.tensor([tokens]), ends, tokens, tokens))
        slots = torch.tensor([3 * PAGE, 3 * PAGE + 1, 3 * PAGE + 2, 3 * PAGE + 3, PAGE])
        codes, scale = cache.keys[1].flatten(0, 1)[slots], cache.key_scale[1].flatten(0, 1)[slots]
        torch.testing.assert_close(codes * scale[..., None] + cache.key_offset[1], k[0], rtol=0, atol=2.0)
        written.append(codes)
    assert torch.equal(*written)


def test_tokens_that_are_not_finite_spoil_no_text():
    """Some of those at random may be, in rows of the embedding that no text asks for."""
    decoder, ids = tiny.ours("qwen2"), tiny.ids(1, 23)[0]
    exact = logits_of(decoder, ids)
    unused = [token for token in range(decoder.config.vocabulary) if token not in ids.tolist()]
    rows = decoder.embedding.weight.detach()
    rows[unused] = torch.nan
    found = logits_of(decoder, ids, torch.int8, calibrated=True)
    finite = exact.isfinite() & found.isfinite()
    assert finite.any(-1).all()
    assert (found - exact)[finite].norm() < 0.05 * exact[finite].norm()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.float32), ("gemma2", torch.int8), ("deepseek_v2", torch.int8)],
)
def test_caches_that_take_none_get_none(family, dtype):
    decoder = tiny.ours(family)
    cache = models.PagedCache(decoder.config, PAGES, PAGE, dtype)
    calibrate_key_offset(decoder, cache)
    assert cache.key_offset is None


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "deepseek_v2"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_queries_of_prompts_as_codes_are_nearly_the_numbers(family, dtype, monkeypatch):
    from tilestack.models import paged

    decoder, ids, called = tiny.ours(family), tiny.ids(1, 23)[0], []
    for name in ("paged_attention", "paged_attention_codes"):
        operator = getattr(paged.ops, name)
        monkeypatch.setitem(
            vars(paged.ops), name, lambda *given, of=operator, **named: called.append((of.name, given[6])) or of(*given, **named)
        )  # fmt: skip
    exact = logits_of(decoder, ids)
    called.clear()
    found = logits_of(decoder, ids, dtype, calibrated=True, code_queries=True)
    assert {("paged_attention_codes", 18), ("paged_attention", 1), ("paged_attention", 4)} == set(called)
    error = (found - exact).norm() / exact.norm()
    assert 1e-4 < error < (0.02 if dtype == torch.int8 else 0.09)
