"""The batch-invariant mode: what an engine says of the tokens it served is what training finds, bit for bit."""

import pytest
import tiny_models as tiny
import torch

from tilestack import backend, batch_invariant
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.settings import bytes_of_token
from tilestack.models import invariant
from tilestack.train.evaluation.log_probs import Scored, in_rows, invariant_log_probs, log_probs

PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29, 31], [5, 7, 11, 13, 17, 19, 23, 29, 37, 41], [3], [5, 7, 11, 13, 2, 9, 8]]


def served(decoder, prompts=PROMPTS, count=9, pages=40, **settings):
    """Answers with their log-probabilities, and the engine that gave them."""
    memory = pages * 4 * bytes_of_token(decoder.embedding.weight.dtype, decoder)
    made = EngineSettings(**(dict(page=4, kv_memory=memory, batch_invariant=True, context=48) | settings))
    engine = Engine(decoder, None, made)
    params = lambda n: SamplingParams(temperature=1.0, seed=n, max_tokens=count, ignore_eos=True, logprobs=1)
    return engine, LLM(engine).run([Request(f"{n}", prompt, params(n)) for n, prompt in enumerate(prompts)])


def trained(decoder, prompt, answer):
    """What training finds of an answer's tokens, all in rows with others."""
    other = Scored.answer([9, 9, 4], [8, 1, 6, 7, 7, 3, 2, 2, 1, 1, 5, 5, 60, 61, 62, 63, 64])
    rows = in_rows([other, Scored.answer(prompt, answer)])
    return invariant_log_probs(decoder, rows)[1, len(prompt) - 1 : len(prompt) + len(answer) - 1]


def logprobs(output):
    return torch.tensor([each.logprob for each in output.completions[0].logprobs])


SERVING = dict(
    together={},
    chunks=dict(step_tokens=5),
    alone=dict(max_sequences=1),
    preempted=dict(pages=9, context=36, prefix_caching=False),
    swapped=dict(pages=9, context=36, swap_memory=1 << 20),
    lookup=dict(speculate="lookup"),
    in_order=dict(overlap=False),
)


@pytest.mark.parametrize("how", SERVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_finds_the_bits_that_were_served(how, dtype):
    decoder = tiny.ours("qwen3").to(dtype).eval()
    engine, outputs = served(decoder, **SERVING[how])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert torch.equal(logprobs(output), trained(decoder, prompt, output.completions[0].ids))
    stats = engine.stats()
    assert stats.preemptions or how not in ("preempted", "swapped")
    assert stats.cached_tokens or how != "alone"  # where the second finds what the first left


@pytest.mark.parametrize("family", ["smollm2", "mistral", "gemma3", "qwen3_moe", "deepseek_v2"])
def test_in_every_kind_of_model(family):
    decoder = tiny.ours(family).eval()
    _, outputs = served(decoder, step_tokens=5)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert torch.equal(logprobs(output), trained(decoder, prompt, output.completions[0].ids))


def test_a_prefix_that_was_found_has_the_same_bits():
    decoder = tiny.ours("smollm2").eval()
    engine, first = served(decoder)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, logprobs=1)
    again = LLM(engine).run([Request("again", PROMPTS[1], params)])[0]
    assert again.usage.cached == 8
    assert torch.equal(logprobs(again), logprobs(first[1]))


def test_without_the_mode_they_are_close_and_not_equal():
    """Else the tests above would show nothing."""
    decoder = tiny.ours("smollm2", hidden_size=96, intermediate_size=200).eval()
    _, outputs = served(decoder, batch_invariant=False, decode="operators")
    rows = in_rows([Scored.answer(p, o.completions[0].ids) for p, o in zip(PROMPTS, outputs, strict=True)])
    found = log_probs(decoder, rows)
    pairs = [
        (logprobs(output), found[n, len(prompt) - 1 : len(prompt) + 8])
        for n, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True))
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_the_kernels_of_gpus_agree_with_each_other_too(monkeypatch, family):
    """The path of GPUs, in the interpreter: flat batches of serving and rows of training on batch-invariant kernels."""
    monkeypatch.setattr(invariant, "one_at_a_time", lambda device: False)
    decoder = tiny.ours(family, num_hidden_layers=1).eval()
    with backend("triton", sample="torch", paged_attention="torch"):
        _, outputs = served(decoder, PROMPTS[:2], count=3, step_tokens=6)
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            with batch_invariant():
                assert torch.equal(logprobs(output), trained(decoder, prompt, output.completions[0].ids))


def test_gradients_are_those_of_the_plain_forward():
    decoder = tiny.ours("qwen3").double().train()
    rows = in_rows([Scored.answer([3, 5, 7], [9, 11, 13]), Scored.answer([4], [6, 8])])
    gradients = []
    for function in (log_probs, invariant_log_probs):
        decoder.zero_grad()
        function(decoder, rows).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in decoder.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [dict(weights="int8"), dict(kv_dtype="int8"), dict(decode="persistent")])
def test_what_the_mode_is_not_for(settings):
    with pytest.raises(ValueError, match="batch_invariant is for the model as it was trained"):
        EngineSettings(batch_invariant=True, **settings)


def test_a_rotation_that_depends_on_what_is_beside_is_refused():
    with pytest.raises(ValueError, match="no batch-invariant mode: the model's rotation depends on the length"):
        served(tiny.ours("llama_dynamic"), context=None)
