"""The engine on a GPU: CUDA graphs, overlap and the paged kernels give the tokens of plain decoding, and nothing leaks."""

import pytest
import torch

from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams

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
