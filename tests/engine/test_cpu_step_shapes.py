"""The CPU's step beside the definitions in float64, by the judge of every kernel: models of odd sizes and all that a model
may have, weights of every kind, and texts of several sequences read in steps of many lengths.

Nothing is right by chance: pages, and all memory that a step asks for, hold NaN where nobody has written, and norms have
weights of their own. Keys and values are judged like logits, layer by layer. Behind each of them and of the weights begins
memory that must not be touched.
"""

import copy
import itertools
from unittest import mock

import pytest
import torch
from fenced_memory import Fences

from tilestack.engine.cpu_step import CPUStep, why_not
from tilestack.engine.cpu_weights import Int8Linear, pack_for_cpu
from tilestack.kernels.cpu import build
from tilestack.lab.proof.memory_guards import poisoned_memory
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.models import Decoder, ModelConfig, PagedBatch, PagedCache

pytestmark = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
SMALL = dict(vocabulary=97, hidden=48, intermediate=80, layers=2, heads=4, kv_heads=2, head_dim=32, family="qwen3", positions=256)  # fmt: skip
MODELS = {
    "a head of keys for each": dict(heads=3, kv_heads=3, head_dim=80, tied=True),
    "many heads share their keys": dict(heads=24, kv_heads=1, head_dim=16, vocabulary=33),
    "more heads than a block has queries": dict(heads=70, kv_heads=1, head_dim=16, layers=1),
    "norms and an epsilon that matters": dict(qk_norm="head", head_dim=48, norm_eps=0.3, layers=3, rope_scaling=YARN),
    "wide heads": dict(head_dim=128, qk_norm="head", vocabulary=515, hidden=80, rope_scaling=LLAMA3),
    "sizes of one vector": dict(hidden=16, intermediate=16, heads=2, kv_heads=1, vocabulary=5, head_dim=96),
    "scores of another scale": dict(
        head_dim=64, attention_scale=0.05, intermediate=144, rope_scaling=dict(rope_type="linear", factor=2.0)
    ),
}
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8 beside float32": (torch.float32, "int8"),
    "int8 beside bfloat16": (torch.bfloat16, "int8"),
}
# New tokens of each of four sequences in each step; the last never has any. More than 64 are more than attention meets at a
# time, and in one step the second sequence goes on at the position after the first one's last.
FEW_TOKENS = [(1, 0, 0, 0), (2, 5, 1, 0), (0, 4, 10, 0), (1, 1, 1, 0), (11, 0, 0, 0), (4, 0, 4, 0), (0, 7, 0, 0)]
MANY_TOKENS = [
    (17, 0, 0, 0),
    (1, 70, 0, 0),
    (50, 0, 130, 0),
    (2, 20, 1, 0),
    (20, 3, 1, 0),
    (64, 32, 0, 0),
    (0, 16, 1, 0),
]
PAGE, PADDING, THREADS = 5, 2, 3


def made(changes, dtype):
    """A decoder whose weights are all large enough to tell them apart."""
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(**SMALL | changes)).eval()
    for parameter in decoder.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.uniform_(0.3, 1.7)
    return decoder.to(dtype)


def packed(decoder, weights):
    """A decoder, packed or not, and itself in float64."""
    if weights is not None:
        pack_for_cpu(decoder, weights)
    exact = copy.deepcopy(decoder)
    for layer in exact.modules():
        if isinstance(layer, Int8Linear):
            layer.weight = torch.nn.Parameter(layer.codes.double() * layer.code_scale.double()[:, None])
            layer.__class__ = torch.nn.Linear
    return decoder, exact.double()


def fence(fences, decoder, cache):
    """Put fences around all that a step is given."""
    for parameter in decoder.parameters():
        if not parameter.is_meta:
            parameter.data = fences.around(parameter.data)
    for layer in decoder.modules():
        if isinstance(layer, Int8Linear):
            layer.codes, layer.code_scale = fences.around(layer.codes), fences.around(layer.code_scale)
    cache.keys, cache.values = fences.around(cache.keys), fences.around(cache.values)


def batches(cache, steps, vocabulary):
    """Each step's ids and its batch, both filled up with padding."""
    blocks = [-(-sum(new) // PAGE) for new in zip(*steps, strict=True)]
    pages = iter(torch.randperm(sum(blocks)).add(1).tolist())
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for table, count in zip(tables, blocks, strict=True):
        table[:count] = torch.tensor(list(itertools.islice(pages, count)))
    read = torch.zeros(len(blocks), dtype=int)
    for new in steps:
        read = read + torch.tensor(new)
        ids = torch.randint(vocabulary, (sum(new) + PADDING,))
        offsets = torch.tensor(list(itertools.accumulate(new, initial=0)), dtype=torch.int32)
        yield ids, PagedBatch(cache, tables[:, : -(-int(read.max()) // PAGE)], read, offsets, len(ids), max(new))


def poisoned_cache(config, steps, dtype):
    """Pages for all tokens of some steps, and one that is nobody's."""
    cache = PagedCache(config, 1 + sum(-(-sum(new) // PAGE) for new in zip(*steps, strict=True)), PAGE, dtype)
    for kept in cache.tensors():
        kept.fill_(torch.nan)
    return cache


def check(changes, dtype, weights, steps):
    """Judge logits, and what every layer keeps."""
    decoder, exact = packed(made(changes, dtype), weights)
    caches = [poisoned_cache(decoder.config, steps, each) for each in (dtype, dtype, torch.float64)]
    fence(fences := Fences(), decoder, caches[0])
    assert not why_not(decoder)
    with mock.patch.object(torch, "get_num_threads", return_value=THREADS):
        step = CPUStep(decoder, caches[0])
    if max(map(sum, steps)) + PADDING > step.most:
        pytest.skip("this CPU has no instructions for products of bfloat16")
    logits = [], [], []
    for ids, batch in batches(caches[0], steps, decoder.config.vocabulary):
        with poisoned_memory():
            found = step.logits(step.hidden(ids, batch))
        wanted = [
            model(ids, context=batch.over(cache)) for model, cache in zip((decoder, exact), caches[1:], strict=True)
        ]
        for kept, each in zip(logits, (found.to(dtype), *wanted), strict=True):
            kept.append(each[:-PADDING])
    assert fences.are_whole()
    kept_by_layers = zip(*(itertools.chain(*cache.tensors()) for cache in caches), strict=True)
    for result, reference, truth in (map(torch.cat, logits), *kept_by_layers):
        verdict = judge(result, reference, truth, own_error(reference, truth))
        assert not verdict.message, verdict.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_steps_of_few_tokens(model, kind):
    check(MODELS[model], *KINDS[kind], FEW_TOKENS)


@torch.no_grad()
def test_more_tokens_than_there_is_code_for_are_refused():
    decoder = made({}, torch.float32)
    cache = PagedCache(decoder.config, 2, 32)
    step = CPUStep(decoder, cache)
    table, whole = torch.tensor([[1]]), torch.tensor([0, 17])
    with pytest.raises(ValueError, match="at most 16 tokens here, not 17"):
        step.hidden(torch.zeros(17, dtype=int), PagedBatch(cache, table, torch.tensor([17]), whole, 17, 17))
    with pytest.raises(ValueError, match="at most 16 tokens here, not 17"):
        step.logits(torch.zeros(17, 48))


@pytest.mark.parametrize("kind", ["bfloat16", "int8 beside bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_steps_of_many_tokens(model, kind):
    check(MODELS[model], *KINDS[kind], MANY_TOKENS)


@pytest.mark.parametrize("steps", [FEW_TOKENS, MANY_TOKENS])
@torch.no_grad()
def test_scores_that_are_far_apart(steps):
    """In float32 a handful of near ties would decide how far off a result is."""
    check(dict(attention_scale=16.0, layers=1), torch.bfloat16, None, steps)
