"""Decoding on a CPU as one compiled call: the numbers of the operators, a token's bits in any batch, and all without it."""

import copy
import logging

import pytest
import tiny_models as tiny
import torch

from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.cpu_step import CPUStep, why_not
from tilestack.engine.cpu_weights import pack_for_cpu
from tilestack.kernels.cpu import build
from tilestack.kernels.cuda.build import BuildError
from tilestack.models import PagedBatch, PagedCache

IDS = torch.tensor([(37 * place) % 90 + 3 for place in range(40)])
needs_compiler = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")


def fitting(family="smollm2", dtype=torch.float32):
    """A tiny model whose sizes are multiples of 16."""
    torch.manual_seed(0)
    return tiny.ours(family, hidden_size=48, intermediate_size=80, head_dim=32).to(dtype).eval()


def logits_in_steps(decoder, lengths, dtype):
    """Logits of IDS, read in steps of so many tokens."""
    cache = PagedCache(decoder.config, 12, 4, dtype)
    table, step, found, read = torch.tensor([[7, 2, 9, 4, 1, 8, 3, 10, 5, 11]]), CPUStep(decoder, cache), [], 0
    for length in lengths:
        ids, read = IDS[read : read + length], read + length
        batch = PagedBatch(cache, table, torch.tensor([read]), torch.tensor([0, length]), length, length)
        found.append(step.logits(step.hidden(ids, batch)))
    return torch.cat(found)


@needs_compiler
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_step_is_as_exact_as_the_operators(family, dtype):
    decoder = fitting(family, dtype)
    truth = copy.deepcopy(decoder).double()(IDS)
    found = logits_in_steps(decoder, [1, 3, 16, 16, 4], dtype)
    assert (found - truth).norm() <= 1.1 * (decoder(IDS) - truth).norm()


@needs_compiler
@torch.no_grad()
def test_eight_bits_are_those_of_the_layers():
    decoder = fitting()
    pack_for_cpu(decoder, "int8")
    torch.testing.assert_close(logits_in_steps(decoder, [16, 16, 8], torch.float32), decoder(IDS), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_token_has_the_same_bits_in_any_batch(dtype):
    decoder = fitting("qwen3", dtype)
    alone = logits_in_steps(decoder, [1] * 40, dtype)
    assert torch.equal(alone, logits_in_steps(decoder, [2, 5, 16, 7, 10], dtype))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(alone, logits_in_steps(decoder, [1] * 40, dtype))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_numbers_that_are_not_finite_stay_so():
    decoder = fitting()
    with torch.no_grad():
        decoder.layers[0].mlp.down.weight[3, 5] = torch.nan
    assert logits_in_steps(decoder, [3], torch.float32).isnan().all()


def served(decoder, **settings):
    engine = Engine(decoder, None, EngineSettings(page=4, context=60, **settings))
    greedy = lambda n, length: SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=2, prompt_logprobs=1)  # fmt: skip
    asked = [Request(f"{n}", IDS[n : 9 + 4 * n].tolist(), greedy(n, 12 + n)) for n in range(3)]
    return engine, LLM(engine).run(asked)


@needs_compiler
@pytest.mark.parametrize("settings", [{}, dict(step_tokens=8), dict(speculate="lookup")])
def test_an_engine_serves_the_same_tokens_with_it_and_without(settings):
    decoder = fitting()
    engine, found = served(decoder, **settings)
    assert engine.runner.step is not None
    plain, wanted = served(decoder, decode="operators")
    assert plain.runner.step is None
    for one, other in zip(found, wanted, strict=True):
        assert one.completions[0].ids == other.completions[0].ids
        values = lambda output: [
            each.logprob for each in (*output.prompt_logprobs[1:], *output.completions[0].logprobs)
        ]
        assert values(one) == pytest.approx(values(other), abs=1e-4)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (lambda: tiny.ours("qwen2"), "the model has biases"),
        (lambda: tiny.ours("smollm2").double(), "weights of torch.float64"),
        (lambda: tiny.ours("smollm2", intermediate_size=72), "intermediate must be a multiple of 16, not 72"),
    ],
)
def test_models_that_it_is_not_for(decoder, reason, caplog):
    caplog.set_level(logging.INFO, "tilestack.engine.cpu_step")
    decoder = decoder()
    assert reason in why_not(decoder, PagedCache(decoder.config, 3, 4, decoder.embedding.weight.dtype))
    assert Engine(decoder, None, EngineSettings(context=32)).runner.step is None
    assert f"decoding operator by operator: {reason}" in caplog.text


def test_without_a_compiler_everything_works(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    decoder = fitting()
    assert why_not(decoder, PagedCache(decoder.config, 3, 4)) == "there is no no-such-compiler to compile it"
    engine, outputs = served(decoder)
    assert engine.runner.step is None
    assert [len(output.completions[0].ids) for output in outputs] == [12, 13, 14]


@needs_compiler
def test_what_does_not_compile_is_an_error_that_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"decode_step.cpp did not compile:[^$]*WEIGHT"):
        build.library("decode_step.cpp", PLAIN="float", WEIGHT="no_such_type")
    assert not list(tmp_path.rglob("*.so"))
