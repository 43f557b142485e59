"""A decode step as one persistent kernel against the plain one: logits within the error of bfloat16, and the same tokens."""

import copy

import pytest
import torch

from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.captured import Size
from tilestack.engine.decoding_one import PersistentSteps
from tilestack.engine.persistent import PersistentStep, why_not
from tilestack.engine.quantised_weights import has_codes, quantise_weights
from tilestack.models import PagedBatch
from tilestack.nn import Linear
from tilestack.quant import QuantisedLinear

SMALL = dict(
    vocabulary=1003, hidden=512, intermediate=1024, layers=3, heads=16, kv_heads=8, head_dim=64, positions=4096
)
QWEN3 = dict(vocabulary=151936, hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128,
             family="qwen3", qk_norm="head", tied=True, rope_base=1e6, positions=4096)  # fmt: skip
SHARED = dict(
    vocabulary=517, hidden=512, intermediate=2048, layers=2, heads=32, kv_heads=8, head_dim=64, positions=4096
)
MODELS = {
    "small": SMALL,
    "small, norms": SMALL | dict(family="qwen3", qk_norm="head"),
    "shared": SHARED,
    "qwen3": QWEN3,
    "small, fp8": SMALL,
    "qwen3, fp8": QWEN3,
}


@pytest.fixture(scope="module", params=list(MODELS))
def decoder(request):
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = models.Decoder(models.ModelConfig(**MODELS[request.param])).to(torch.bfloat16).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if request.param.endswith("fp8"):
        quantise_weights(made, "fp8")
    if reason := device_reason(made):
        pytest.skip(reason)
    return made


def device_reason(decoder):
    engine = engine_of(decoder)
    return why_not(decoder, engine.runner.cache)


def with_numbers(decoder):
    """The decoder in float32, with numbers in place of codes."""
    exact = copy.deepcopy(decoder).float()
    for layer in exact.modules():
        if isinstance(layer, QuantisedLinear):
            layer.weight = torch.nn.Parameter(layer.kept.numbers(), requires_grad=False)
            layer.__class__ = Linear
    return exact


def engine_of(decoder, **settings):
    usual = dict(page=16, max_sequences=4, kv_memory=1 << 29, context=3000, queue=None)
    return Engine(decoder, None, EngineSettings(**(usual | settings)))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 17, 33, 600, 1025, 2500])
def test_logits_are_as_good_as_the_plain_steps(decoder, length):
    engine = engine_of(decoder)
    runner, page = engine.runner, engine.runner.cache.page
    blocks = -(-length // page)
    pages = torch.randperm(blocks, device="cuda")[None] + 1
    kept = runner.cache.tensors()
    for tensor in kept:
        tensor.normal_()
    before = [tensor.clone() for tensor in kept]
    ids, lengths = torch.tensor([length % 500], device="cuda"), torch.tensor([length], device="cuda")

    def plain(model, cache):
        batch = PagedBatch(cache, pages, lengths, torch.tensor([0, 1], device="cuda"), tokens=1, most_queries=1)
        return model.logits(model.hidden(ids, context=batch)).float()

    usual = plain(decoder, runner.cache)
    usual_kept = [tensor.clone() for tensor in kept]
    for tensor, old in zip(kept, before, strict=True):
        tensor.copy_(old)
    ours = PersistentStep(runner).logits(ids, lengths, pages)

    exact = with_numbers(decoder)
    wide = models.PagedCache(decoder.config, before[0].shape[1], page, torch.float32, "cuda")
    for tensor, old in zip(wide.tensors(), before, strict=True):
        tensor.copy_(old)
    truth = plain(exact, wide)
    error = lambda logits: float((logits - truth).norm() / truth.norm())
    assert error(ours) <= 1.1 * error(usual), f"{error(ours)} beside {error(usual)}"
    for ours_kept, theirs, old in zip(kept, usual_kept, before, strict=True):  # one token was put into its page
        written = (ours_kept != old).nonzero()
        place = [int(pages[0, (length - 1) // page]), (length - 1) % page]
        assert {tuple(row) for row in written[:, 1:3].tolist()} == {tuple(place)}
        torch.testing.assert_close(ours_kept[0].float(), theirs[0].float(), rtol=0.02, atol=0.02)


@torch.no_grad()
def test_it_gives_the_same_bits_in_every_run(decoder):
    engine = engine_of(decoder)
    for tensor in engine.runner.cache.tensors():
        tensor.normal_()
    step = PersistentStep(engine.runner)
    ids, lengths = torch.tensor([3], device="cuda"), torch.tensor([700], device="cuda")
    pages = torch.arange(1, 45, device="cuda")[None]
    first = step.logits(ids, lengths, pages)
    assert all(torch.equal(first, step.logits(ids, lengths, pages)) for _ in range(20))


def test_greedy_tokens_are_those_of_the_plain_step_or_near_ties(decoder):
    prompt = [(7 * place) % 500 for place in range(100)]
    answers = {}
    for decode in ("operators", "persistent"):
        engine = engine_of(decoder, decode=decode)
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        (answer,) = LLM(engine).run([Request("one", prompt, params)])
        answers[decode] = answer.completions[0].ids
        assert engine.stats().pages_used == 0
    plain, ours = answers["operators"], answers["persistent"]
    if plain == ours:
        return
    first = next(place for place, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b)
    text = torch.tensor([prompt + plain[:first]], device="cuda")
    with torch.no_grad():
        logits = with_numbers(decoder)(text)[0, -1]
    apart = abs(float(logits[plain[first]] - logits[ours[first]]))
    near = 2**-4 if has_codes(decoder) else 2**-6  # the prompt's rows were codes too where the engine read it
    assert apart <= near * float(logits.abs().max()), f"token {first}: {plain[first]} or {ours[first]}, {apart} apart"


@pytest.mark.parametrize("decode", [None, "persistent"])
def test_it_is_taken_for_a_batch_of_one_and_others_go_on_as_usual(decoder, decode):
    engine = engine_of(decoder, decode=decode)
    persistent, decoding, _ = engine.runner.captured
    assert isinstance(persistent, PersistentSteps)
    params = lambda n: SamplingParams(temperature=0.8, seed=n, max_tokens=8 + 3 * n, ignore_eos=True)
    found = LLM(engine).run([Request(f"{n}", [n, 5, 9], params(n)) for n in range(3)])
    assert [len(each.completions[0].ids) for each in found] == [8, 11, 14]
    assert list(persistent.graphs) == [Size(1, 1)]
    assert decoding.graphs
