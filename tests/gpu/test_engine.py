"""The engine on a GPU: CUDA graphs, overlap and the paged kernels give the tokens of plain decoding, and nothing leaks."""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tilestack
from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams, Structure
from tilestack.engine.quantised_weights import quantise_weights
from tilestack.engine.runner import Runner
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.models.adapters import load_adapters, save_adapters
from tilestack.nn.lora import add_lora, lora_parameters, merge_lora

CONFIG = dict(vocabulary=512, hidden=256, intermediate=512, layers=3, heads=4, kv_heads=2, head_dim=64, positions=1024)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    with torch.device("cuda"):
        return models.Decoder(models.ModelConfig(**CONFIG)).eval()


def requests(count=12, temperature=0.0):
    make = lambda n: SamplingParams(temperature=temperature, seed=n, max_tokens=20 + n, ignore_eos=True)
    return [Request(f"{n}", [(7 * n + 3 * place) % 512 for place in range(5 + 11 * n)], make(n)) for n in range(count)]


def engine_of(decoder, draft=None, tokenizer=None, **settings):
    usual = dict(page=16, step_tokens=128, max_sequences=8, kv_memory=1 << 26, queue=None)
    return Engine(decoder, tokenizer, EngineSettings(**(usual | settings)), draft)


def answers(decoder, temperature=0.0, draft=None, asked=None, **settings):
    engine = engine_of(decoder, draft, **settings)
    found = [output.completions[0].ids for output in LLM(engine).run(asked or requests(temperature=temperature))]
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_changes_nothing(decoder, temperature):
    draft = copy.deepcopy(decoder)
    with torch.no_grad():
        draft.layers[1].mlp.down.weight.zero_()  # right at times
    drafted = answers(decoder, temperature, draft, speculate="a model", draft_tokens=3)
    assert drafted == answers(decoder, temperature)


ASKING = [
    {},
    dict(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    dict(logprobs=3),
    dict(logit_bias={3: 4.0, 7: -100.0}),
    dict(min_tokens=12, stop_ids=tuple(range(0, 512, 2))),
]


def asking(temperature):
    """Requests that ask for one thing each, some for nothing."""
    asked = requests(temperature=temperature)
    for number, request in enumerate(asked):
        request.params = replace(request.params, **ASKING[number % len(ASKING)])
    return asked


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("changed", [{}, dict(overlap=False), dict(speculate="lookup")])
def test_who_asks_for_more_than_the_tables_hold_is_served_in_graphs_too(decoder, changed, temperature, monkeypatch):
    """The tokens are those of steps kernel by kernel, and of those who ask for nothing the same as without the others."""
    usual = answers(decoder, temperature, asked=asking(temperature), graphs=False)
    with monkeypatch.context() as patched:
        if "speculate" not in changed:  # there are no graphs of guesses beside a prompt
            patched.setattr(Runner, "kernel_by_kernel", None)
        found = answers(decoder, temperature, asked=asking(temperature), **changed)
    assert found == usual
    assert found[:: len(ASKING)] == answers(decoder, temperature)[:: len(ASKING)]


def test_steps_are_launched_without_waiting_for_the_gpu(decoder, monkeypatch):
    engine = engine_of(decoder, prefix_caching=False)
    first = LLM(engine).run(asking(0.8))  # which captures the graphs
    begin = engine.runner.begin

    def without_waiting(parts):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return begin(parts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.runner, "begin", without_waiting)
    again = LLM(engine).run(asking(0.8))
    assert [output.completions[0].ids for output in again] == [output.completions[0].ids for output in first]


@torch.no_grad()
def test_log_probabilities_in_graphs_are_those_of_the_model(decoder):
    outputs = LLM(engine_of(decoder)).run(asking(0.8))
    exact_model = copy.deepcopy(decoder).double()
    served, plain, exact = [], [], []
    for output in outputs:
        answer = output.completions[0]
        ids = torch.tensor([*output.prompt, *answer.ids], device="cuda")
        for place, told in enumerate(answer.logprobs):
            assert told.id == answer.ids[place]
            served.append(told.logprob)
            for model, found in ((decoder, plain), (exact_model, exact)):
                logits = model(ids[None, : len(output.prompt) + place])[0, -1]
                found.append(float(torch.log_softmax(logits, -1)[told.id]))
    assert len(served) > 40
    reference, truth = torch.tensor(plain), torch.tensor(exact, dtype=torch.float64)
    verdict = judge(torch.tensor(served), reference, truth, own_error(reference, truth))
    assert not verdict.message, verdict.message


def test_adapters_in_graphs(decoder, tmp_path, monkeypatch):
    folders = {}
    for seed, name in enumerate("ab", 1):
        adapted = copy.deepcopy(decoder).cpu()
        add_lora(adapted, ["*.qkv", "*.down"], rank=4, alpha=8.0)
        torch.manual_seed(seed)
        for _, parameter in lora_parameters(adapted):
            torch.nn.init.normal_(parameter, std=0.1)
        save_adapters(adapted, folders.setdefault(name, tmp_path / name))
    asked = requests()
    for number, request in enumerate(asked):
        request.adapter = ["a", None, "b"][number % 3]
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "kernel_by_kernel", None)
        found = answers(copy.deepcopy(decoder), asked=asked, adapters=folders)
    alone = {None: answers(decoder)}
    for name, folder in folders.items():
        model = copy.deepcopy(decoder)
        load_adapters(model, folder)
        merge_lora(model)
        alone[name] = answers(model)
    assert found == [alone[request.adapter][number] for number, request in enumerate(asked)]
    assert len({tuple(each[0]) for each in alone.values()}) == 3


def test_a_grammar_beside_others(decoder):
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer.train(["yes no maybe 0123456789 " * 30], 512)
    asked = requests(6)
    asked[2].params = replace(asked[2].params, structure=Structure("regex", "(yes|no) [0-9]{3}"), ignore_eos=False)
    outputs = LLM(engine_of(decoder, tokenizer=tokenizer)).run(asked)
    assert re.fullmatch("(yes|no) [0-9]{3}", outputs[2].text)
    usual = answers(decoder)
    assert all(output.completions[0].ids == usual[n] for n, output in enumerate(outputs) if n != 2)


@pytest.mark.parametrize("steps", range(1, 9))
def test_who_is_cancelled_in_flight_leaves_nothing_and_others_their_own(decoder, steps):
    engine = engine_of(decoder)
    asked = requests(8)
    for request in asked:
        engine.add(request)
    found = {request.id: [] for request in asked}
    taken = 0
    while engine.busy:
        for request, delta in engine.step():
            found[request.id] += delta.ids
        taken += 1
        if taken == steps:
            for request in asked[::2]:
                engine.cancel(request.id)
    assert engine.stats().pages_used == 0
    assert [found[request.id] for request in asked[1::2]] == answers(decoder)[1:8:2]
    again = [output.completions[0].ids for output in LLM(engine).run(requests(8))]
    assert again == answers(decoder)[:8]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@torch.no_grad()
def test_texts_become_vectors_beside_graphs(decoder, pooling):
    """Read in chunks that leave the graphs, while others decode in them."""
    texts = [Request(f"text{n}", request.prompt * 3, pooling=pooling) for n, request in enumerate(requests(6))]
    outputs = LLM(engine_of(decoder)).run([each for pair in zip(requests(6), texts, strict=True) for each in pair])
    assert [output.completions[0].ids for output in outputs[::2]] == answers(decoder)[:6]
    for request, output in zip(texts, outputs[1::2], strict=True):
        states = decoder.hidden(torch.tensor(request.prompt, device="cuda"))
        expected = torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)
        torch.testing.assert_close(torch.tensor(output.completions[0].vector), expected.cpu(), rtol=1e-3, atol=1e-4)


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


ANSWERS = """
import json, logging, sys, torch
from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
with torch.device("cuda"):
    decoder = models.Decoder(models.ModelConfig(**json.loads(sys.argv[1]))).bfloat16().eval()
engine = Engine(decoder, None, EngineSettings(step_tokens=128, max_sequences=4))
engine.runner.warm_up()
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
asked = [Request(f"{n}", [(7 * n + 3 * place) % 512 for place in range(5 + 11 * n)], params) for n in range(6)]
print(json.dumps([output.completions[0].ids for output in LLM(engine).run(asked)]))
"""


def test_kernels_compiled_ahead_answer_as_those_compiled_one_by_one(tmp_path):
    """In processes whose cache is empty: what was passed over in the listing must leave no trace in the tokens."""
    found = {}
    for jobs in ("1", "8"):
        environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path / jobs), TILESTACK_COMPILE_JOBS=jobs)
        command = [sys.executable, "-c", ANSWERS, json.dumps(CONFIG)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ("in 8 processes" in done.stderr) == (jobs == "8")
        found[jobs] = json.loads(done.stdout)
    assert found["1"] == found["8"]
    kernels = {jobs: {path.name for path in (tmp_path / jobs).iterdir()} for jobs in found}
    assert kernels["1"] <= kernels["8"]
