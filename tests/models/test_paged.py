"""Sequences of many lengths through one paged context: what each would be alone, in a contiguous cache.

Prompts come in chunks beside tokens of decoding, in a pool that is full of NaN, in pages of any order, with padding.
"""

import itertools
import random

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models.paged import block_tables_of

families = pytest.mark.parametrize(
    "family",
    ["llama2", "smollm2", "mistral", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi4_mini_long", "olmo2", "glm4"]
    + ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v2_lite"],
)
LENGTHS = (6, 14, 2, 11)
# How many new tokens each sequence has in each forward: chunks of prompts, none at all, then one by one.
STEPS = [(5, 4, 1, 0), (0, 6, 1, 7), (1, 1, 0, 1), (0, 1, 0, 1), (0, 2, 0, 2)]
PAGE, PAGES, PADDED = 4, 16, 24


def alone(decoder, ids):
    """The logits of a sequence read a token at a time."""
    cache = models.KVCache(decoder.config, 1, len(ids))
    return torch.cat([decoder(token[None, None], context=cache)[0] for token in ids])


def poisoned(config):
    pool = models.PagedCache(config, PAGES, PAGE)
    for kept in filter(lambda kept: kept is not None, (pool.keys, pool.values)):
        kept.fill_(torch.nan)
    return pool


def any_steps(draw):
    """The sequences in chunks of any sizes, at least one token in each forward."""
    left = list(LENGTHS)
    while any(left):
        new = [draw.randint(0, min(count, 6)) for count in left]
        if any(new):
            left = [count - read for count, read in zip(left, new, strict=True)]
            yield new


def batches(pool, steps=STEPS, seed=0):
    """For each forward: (its context, which tokens of which sequence it reads)."""
    free = list(range(1, PAGES))
    random.Random(seed).shuffle(free)
    tables = block_tables_of([[free.pop() for _ in range(-(-length // PAGE))] for length in LENGTHS])
    done = [0] * len(LENGTHS)
    for new in steps:
        reads = [range(start, start + count) for start, count in zip(done, new, strict=True)]
        done = [read.stop for read in reads]
        offsets = torch.tensor(list(itertools.accumulate(new, initial=0)), dtype=torch.int32)
        lengths = torch.tensor(done, dtype=torch.int32)
        yield models.PagedBatch(pool, tables, lengths, offsets, PADDED, max(new)), reads
    assert tuple(done) == LENGTHS


@torch.no_grad()
def check_as_alone(decoder, steps, seed=0):
    texts = tiny.ids(len(LENGTHS), max(LENGTHS))
    expected = [alone(decoder, text[:length]) for text, length in zip(texts, LENGTHS, strict=True)]
    found = [[] for _ in LENGTHS]
    for batch, reads in batches(poisoned(decoder.config), steps, seed):
        ids = torch.cat([text[read.start : read.stop] for text, read in zip(texts, reads, strict=True)])
        padding = torch.full((PADDED - len(ids),), 3)
        logits = decoder(torch.cat((ids, padding)), context=batch)
        assert logits.shape == (PADDED, 97)
        parts = logits[: len(ids)].split([len(read) for read in reads])
        for kept, part in zip(found, parts, strict=True):
            kept.append(part)
    for whole, parts in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@families
def test_ragged_batches_are_as_sequences_alone(family):
    check_as_alone(tiny.ours(family), STEPS)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v2"])
def test_so_are_chunks_of_any_sizes(family):
    decoder = tiny.ours(family)
    for seed in range(5):
        check_as_alone(decoder, any_steps(random.Random(seed)), seed)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_codes_in_the_pool_are_nearly_the_numbers(family, dtype):
    decoder, ids = tiny.ours(family), tiny.ids(1, 14)[0]
    logits = {}
    for kind in (torch.float32, dtype):
        pool = models.PagedCache(decoder.config, PAGES, PAGE, dtype=kind)
        table, found = block_tables_of([[3, 1, 4, 2]]), []
        for length, new in ((9, 9), (10, 1), (14, 4)):
            ends = torch.tensor([0, new], dtype=torch.int32)
            batch = models.PagedBatch(pool, table, torch.tensor([length], dtype=torch.int32), ends, new, new)
            found.append(decoder(ids[length - new : length], context=batch))
        logits[kind] = torch.cat(found)
    error = (logits[dtype] - logits[torch.float32]).norm() / logits[torch.float32].norm()
    assert 1e-4 < error < (0.02 if dtype == torch.int8 else 0.06)


@torch.no_grad()
@pytest.mark.parametrize("family", ["smollm2", "mistral", "gemma3", "qwen3_moe", "deepseek_v2"])
def test_a_forward_asks_the_device_nothing(family):
    """On `meta` there is nothing to read: a shape or a branch that depended on contents would raise."""
    with torch.device("meta"):
        decoder = models.Decoder(models.ModelConfig.from_hf(tiny.config_of(family)))
    pool = models.PagedCache(decoder.config, PAGES, PAGE, device="meta")
    tables, lengths = (
        torch.zeros(4, 4, dtype=torch.long, device="meta"),
        torch.zeros(4, dtype=torch.int32, device="meta"),
    )
    batch = models.PagedBatch(pool, tables, lengths, torch.zeros(5, dtype=torch.int32, device="meta"), PADDED, 7)
    ids = torch.zeros(PADDED, dtype=torch.long, device="meta")
    assert decoder(ids, context=batch).shape == (PADDED, 97)


def test_a_batch_of_another_size_is_refused():
    decoder = tiny.ours("smollm2")
    batch, _ = next(batches(models.PagedCache(decoder.config, PAGES, PAGE)))
    with pytest.raises(ValueError, match=r"of \[24\] tokens, not of 1 rows of 3"):
        decoder(tiny.ids(1, 3)[0], context=batch)


@torch.no_grad()
def test_positions_are_known_up_to_those_the_model_is_made_for():
    decoder, ids = tiny.ours("llama2", max_position_embeddings=9000), tiny.ids(1, 5)
    far = decoder(ids, torch.arange(8995, 9000))
    torch.testing.assert_close(far, decoder(ids), rtol=1e-2, atol=1e-2)  # angles of far positions have fewer digits


@torch.no_grad()
def test_an_adapter_of_the_head_has_a_say():
    from tilestack.nn.lora import add_lora

    decoder, ids = tiny.ours("llama2"), tiny.ids(1, 4)
    before = decoder(ids)
    (layer,) = add_lora(decoder, ["head"], rank=2).values()
    layer.lora_B.normal_()
    expected = before + decoder.hidden(ids) @ layer.delta().T
    torch.testing.assert_close(decoder(ids), expected)


@torch.no_grad()
def test_an_adapter_of_mla_is_absorbed_too():
    from tilestack.nn.lora import add_lora

    decoder, ids = tiny.ours("deepseek_v2"), tiny.ids(1, 6)
    before = decoder(ids)
    for layer in add_lora(decoder, ["*.kv_up"], rank=2).values():
        layer.lora_B.normal_()
    whole = decoder(ids)
    assert (whole - before).abs().max() > 0.1
    torch.testing.assert_close(alone(decoder, ids[0]), whole[0], rtol=1e-4, atol=1e-4)


def test_inference_counts_no_loads():
    decoder = tiny.ours("qwen3_moe")
    with torch.no_grad():
        decoder(tiny.ids())
    assert decoder.balances() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_that_only_decodes_finds_the_same_places(dtype):
    pool = poisoned(tiny.ours("smollm2").config)
    tables = block_tables_of([[7, 2, 9], [4], [0], [5, 6]])
    lengths = torch.tensor([2 * PAGE + 1, 1, 1, PAGE + 1], dtype=dtype)
    found = models.PagedBatch.decoding(pool, tables, lengths)
    usual = models.PagedBatch(pool, tables, lengths, torch.arange(5), tokens=4, most_queries=1)
    assert (found.tokens, found.most_queries, found.longest) == (4, 1, usual.longest)
    for name in ("cu_queries", "sequences", "positions", "slots"):
        assert torch.equal(getattr(found, name), getattr(usual, name).long()), name
