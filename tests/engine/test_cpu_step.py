"""Steps on a CPU as one compiled call: the numbers of the operators, a decoded token's bits in any batch, all without it."""

import copy
import logging

import pytest
import tiny_models as tiny
import torch

from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.cpu_step import CPUStep, cpu_step, torch_on_one_thread, why_not
from tilestack.engine.cpu_weights import pack_for_cpu, pack_int8
from tilestack.engine.plain_decoder import linears_of
from tilestack.engine.sampling import sample_unfiltered
from tilestack.kernels.cpu import build
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


def takes_many(decoder):
    return CPUStep(decoder, PagedCache(decoder.config, 2, 4, torch.bfloat16)).most > 16


@needs_compiler
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
@pytest.mark.parametrize("lengths", [[40], [17, 23], [3, 36, 1], [20, 1, 19]])
@torch.no_grad()
def test_steps_of_many_tokens_are_as_exact_as_the_operators(family, lengths):
    decoder = fitting(family, torch.bfloat16)
    if not takes_many(decoder):
        pytest.skip("this CPU has no instructions for products of bfloat16")
    truth = copy.deepcopy(decoder).double()(IDS)
    found = logits_in_steps(decoder, lengths, torch.bfloat16)
    assert (found - truth).norm() <= (decoder(IDS) - truth).norm()


@needs_compiler
@torch.no_grad()
def test_many_tokens_of_several_sequences():
    decoder = fitting("qwen3", torch.bfloat16)
    if not takes_many(decoder):
        pytest.skip("this CPU has no instructions for products of bfloat16")
    truth = copy.deepcopy(decoder).double()(IDS)
    cache = PagedCache(decoder.config, 40, 4, torch.bfloat16)
    tables = torch.stack([torch.randperm(10) + 1 + 10 * row for row in range(3)])
    step, read = CPUStep(decoder, cache), torch.zeros(3, dtype=torch.int64)
    for new in ([9, 20, 1], [1, 1, 17], [30, 2, 22], [0, 17, 0]):  # of each; what is decoded stands beside prompts
        counts = torch.tensor(new)
        ids = torch.cat([IDS[start : start + count] for start, count in zip(read.tolist(), new, strict=True)])
        starts, read = read, read + counts
        batch = PagedBatch(cache, tables, read, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), len(ids), max(new))  # fmt: skip
        found = step.logits(step.hidden(ids, batch))
        wanted = torch.cat([truth[start:end] for start, end in zip(starts.tolist(), read.tolist(), strict=True)])
        assert (found - wanted).norm() <= 1.1 * (decoder(IDS) - truth).norm() * (len(ids) / len(IDS)) ** 0.5


@needs_compiler
@torch.no_grad()
def test_many_tokens_see_what_is_not_finite():
    decoder = fitting("smollm2", torch.bfloat16)
    decoder.layers[0].attention.qkv.weight[-3] = torch.nan  # of the values
    if not takes_many(decoder):
        pytest.skip("this CPU has no instructions for products of bfloat16")
    assert logits_in_steps(decoder, [40], torch.bfloat16).isnan().all()


@needs_compiler
@torch.no_grad()
def test_eight_bits_of_many_tokens_are_those_of_the_layers():
    decoder = fitting(dtype=torch.bfloat16)
    pack_for_cpu(decoder, "int8")
    if not takes_many(decoder):
        pytest.skip("this CPU has no instructions for products of bfloat16")
    found, exact = (logits_in_steps(decoder, lengths, torch.bfloat16) for lengths in ([40], [16, 16, 8]))
    assert (found - exact).norm() <= (decoder(IDS) - exact).norm()


@needs_compiler
@torch.no_grad()
def test_eight_bits_are_those_of_the_layers():
    decoder = fitting()
    pack_for_cpu(decoder, "int8")
    torch.testing.assert_close(logits_in_steps(decoder, [16, 16, 8], torch.float32), decoder(IDS), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])  # whose head is the embedding, and is not
@torch.no_grad()
def test_a_head_may_be_plain_beside_layers_of_eight_bits(family):
    decoder = fitting(family)
    for layer in decoder.layers:
        for linear in linears_of(layer):
            pack_int8(linear)
    assert not why_not(decoder)
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


@needs_compiler
@pytest.mark.parametrize("n", [1, 40, 1024, 1025, 4096, 4097, 9000])
def test_tokens_are_drawn_as_by_the_definition(n):
    """By the noise alone, by logits alone, and by both; with numbers that are not finite, ties and every kind of seed."""
    decoder = fitting()
    step = CPUStep(decoder, PagedCache(decoder.config, 2, 4))
    seeds = torch.cat([torch.tensor([0, 5, -(2**63), 2**63 - 1, 2**32, -1]), torch.arange(194) * 977 - 5000])
    drawn = torch.randn(200, n, generator=torch.Generator().manual_seed(n))
    temperature = torch.linspace(0.01, 3, 200)
    temperature[::7], temperature[1::7] = 0, 1e-5  # with the last, ties are still decided by the noise
    broken = drawn.clone()
    broken[0, n // 2], broken[1, -1], broken[2], broken[3, n // 3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    broken[4, -1] = torch.nan  # behind the last whole vector
    for logits in (torch.zeros(200, n), 8 * drawn, broken, drawn.round(), 1e30 * drawn, drawn.repeat(1, 2)[:, ::2]):
        assert torch.equal(
            step.draw(logits, seeds, temperature), sample_unfiltered(logits.contiguous(), seeds, temperature)
        )
    assert step.draw(broken, seeds, temperature)[[0, 1, 2, 4]].tolist() == [-1, -1, -1, -1]


@needs_compiler
@torch.no_grad()
def test_what_a_step_is_given_may_lie_anywhere_and_stays_as_it_is():
    decoder = fitting()
    cache = PagedCache(decoder.config, 2, 4)
    step = CPUStep(decoder, cache).step
    apart = lambda tensor: torch.stack([tensor, torch.full_like(tensor, 77)], -1)[..., 0]
    hidden = torch.randn(2, 48)
    assert torch.equal(step.logits(apart(hidden)), step.logits(hidden))
    given = torch.randn(5, 300), torch.arange(5), torch.ones(5)
    assert torch.equal(step.draw(*map(apart, given)), step.draw(*given))
    batch = PagedBatch(cache, torch.tensor([[1]]), torch.tensor([3]), torch.tensor([0, 3]), 3, 3)
    (cos, sin), _ = decoder.rotary(batch.longest)
    about = batch.positions, batch.slots, batch.sequences, batch.block_tables, cos, sin
    x = torch.randn(3, 48)
    before = x.clone()
    found = step(x, *about)
    assert torch.equal(x, before)
    assert torch.equal(step(apart(x), *about), found)


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


@needs_compiler
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_what_tensors_are_by_default_does_not_matter(default):
    decoder = fitting()
    step, hidden, seeds = CPUStep(decoder, PagedCache(decoder.config, 2, 4)), torch.ones(2, 48), torch.tensor([3, 4])
    told = lambda: [output.completions[0] for output in served(decoder)[1]]
    tensors = lambda: [step.logits(hidden), step.draw(hidden, seeds, hidden[:, 0])]
    wanted, wanted_tensors = told(), tensors()
    torch.set_default_dtype(default)
    try:
        assert told() == wanted
        with torch.device("meta"):
            assert all(map(torch.equal, tensors(), wanted_tensors))
    finally:
        torch.set_default_dtype(torch.float32)


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
    assert reason in why_not(decoder)
    assert Engine(decoder, None, EngineSettings(context=32)).runner.step is None
    assert f"decoding operator by operator: {reason}" in caplog.text


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_keys_of_another_dtype_are_left_to_the_operators_which_is_said_aloud(kept, caplog):
    decoder = fitting()
    assert cpu_step(decoder, PagedCache(decoder.config, 3, 4, kept)) is None
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert f"kept in {kept}; leave kv_dtype out".replace("torch.", "") in said.getMessage()


def listened_to(decoder):
    decoder.layers[1].register_forward_hook(lambda module, given, x: x)


def wrapped(decoder):
    decoder.layers[0].attention.forward = decoder.layers[0].attention.forward


class Sharded(torch.Tensor):
    """Stands for tensors that hold their numbers elsewhere."""


def sharded(decoder):
    norm = decoder.layers[0].mlp_norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().as_subclass(Sharded))


def packed_in_part(decoder):
    pack_int8(decoder.layers[0].mlp.down)


def turned(decoder):
    linear = decoder.layers[0].mlp.down
    linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous().t())


@pytest.mark.parametrize("change", [listened_to, wrapped, sharded, packed_in_part, turned])
def test_models_that_are_more_than_their_weights_are_left_to_the_operators(change):
    decoder = fitting()
    change(decoder)
    assert why_not(decoder)


def test_without_a_compiler_everything_works(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    decoder = fitting()
    assert why_not(decoder) == "there is no no-such-compiler to compile it"
    engine, outputs = served(decoder)
    assert engine.runner.step is None
    assert [len(output.completions[0].ids) for output in outputs] == [12, 13, 14]


@needs_compiler
def test_pytorch_wakes_no_thread_beside_a_step_of_few_tokens(monkeypatch):
    before, threads = torch.get_num_threads(), []
    hidden = CPUStep.hidden
    monkeypatch.setattr(
        CPUStep,
        "hidden",
        lambda self, ids, batch: threads.append((len(ids), torch.get_num_threads())) or hidden(self, ids, batch),
    )
    torch.set_num_threads(2)
    try:
        served(fitting())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    few = [number for tokens, number in threads if tokens <= 16]
    assert set(few) == {1}


def test_pytorch_has_its_threads_again_after_a_step_that_fails():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt), torch_on_one_thread():
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
