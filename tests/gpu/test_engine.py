"""The engine on a GPU: CUDA graphs, overlap and the paged kernels give the tokens of plain decoding, and nothing leaks."""

import copy
from dataclasses import replace

import pytest
import torch

import tilestack
from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.quantised_weights import quantise_weights

CONFIG = dict(vocabulary=512, hidden=256, intermediate=512, layers=3, heads=4, kv_heads=2, head_dim=64, positions=1024)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    with torch.device("cuda"):
        return models.Decoder(models.ModelConfig(**CONFIG)).eval()


def requests(count=12, temperature=0.0):
    make = lambda n: SamplingParams(temperature=temperature, seed=n, max_tokens=20 + n, ignore_eos=True)
    return [Request(f"{n}", [(7 * n + 3 * place) % 512 for place in range(5 + 11 * n)], make(n)) for n in range(count)]


def answers(decoder, temperature=0.0, **settings):
    usual = dict(page=16, step_tokens=128, max_sequences=8, kv_memory=1 << 26, queue=None)
    engine = Engine(decoder, None, EngineSettings(**(usual | settings)))
    found = [output.completions[0].ids for output in LLM(engine).run(requests(temperature=temperature))]
    assert engine.stats().pages_used == 0
    return found


def test_greedy_answers_are_those_of_plain_decoding(decoder):
    plain = []
    for request in requests():
        ids = torch.tensor([request.prompt], device="cuda")
        steps = models.generate(decoder, ids, max_new_tokens=request.params.max_tokens)
        plain.append([int(step[0]) for step in steps])
    assert answers(decoder) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("changed", [dict(graphs=False), dict(overlap=False), dict(kv_memory=1 << 20), dict(swap_memory=1 << 24, kv_memory=1 << 20), dict(speculate="lookup"), dict(prefix_caching=False)])  # fmt: skip
def test_nothing_changes_the_text(decoder, changed, temperature):
    assert answers(decoder, temperature, **changed) == answers(decoder, temperature)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_eight_bit_pages(decoder, kept):
    assert answers(decoder, kv_dtype=kept) == answers(decoder, kv_dtype=kept, graphs=False, overlap=False)


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_weights_of_codes(decoder, format):
    """The tokens are those of the model with the numbers that its codes stand for. In half precision steps of many rows make
    fp8 codes of these too."""
    quantised, exact = copy.deepcopy(decoder), copy.deepcopy(decoder)
    quantise_weights(quantised, format)
    for path, layer in exact.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            rows = torch.eye(layer.in_features, device="cuda")
            with tilestack.backend("torch"), torch.no_grad():
                layer.weight.copy_(quantised.layers.get_submodule(path)(rows).T)
    assert answers(quantised, weights=format) == answers(exact)
    half = copy.deepcopy(decoder).to(torch.bfloat16)
    quantise_weights(half, format)
    found = answers(half, weights=format)
    assert all(len(ids) == 20 + n for n, ids in enumerate(found))
    assert found == answers(half, weights=format)


def test_memory_is_found_and_stays_flat(decoder):
    engine = Engine(decoder.to(torch.bfloat16), None, EngineSettings(max_sequences=32, queue=None))
    llm = LLM(engine)
    llm.run(requests(40, 0.7))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        llm.run(requests(40, 0.7))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    decoder.to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [{}, dict(step_tokens=24), dict(max_sequences=1), dict(kv_memory=1 << 19, prefix_caching=False), dict(speculate="lookup")],
    ids=["together", "chunks", "alone", "preempted", "lookup"],
)  # fmt: skip
def test_training_finds_the_bits_that_were_served_in_the_batch_invariant_mode(decoder, dtype, settings):
    from tilestack.train.evaluation.log_probs import Scored, in_rows, invariant_log_probs

    model = copy.deepcopy(decoder).to(dtype)
    usual = dict(page=16, step_tokens=128, max_sequences=8, kv_memory=1 << 26, queue=None, batch_invariant=True)
    engine = Engine(model, None, EngineSettings(**(usual | settings)))
    asked = requests(6, temperature=1.0)
    for request in asked:
        request.params = replace(request.params, logprobs=0)
    outputs = LLM(engine).run(asked)
    assert engine.stats().preemptions or "prefix_caching" not in settings
    answers = [output.completions[0] for output in outputs]
    pairs = zip(asked, answers, strict=True)
    rows = in_rows([Scored.answer(request.prompt, answer.ids) for request, answer in pairs]).to("cuda")
    with torch.no_grad():
        found = invariant_log_probs(model, rows)
    for request, answer, row in zip(asked, answers, found.cpu(), strict=True):
        first = len(request.prompt) - 1
        served = torch.tensor([told.logprob for told in answer.logprobs])
        assert torch.equal(served, row[first : first + len(answer.ids)])
