"""Speculation changes how many steps there are and nothing else."""

import pytest
import tiny_models as tiny
from engines import alone, check_empty, check_pages, decoder, greedy, make_engine, serve

from tilestack.engine import Request, SamplingParams
from tilestack.engine.speculation import LookUp

COPIED = [3, 5, 7, 11, 13, 17] * 4


def some_requests(temperature):
    params = lambda n: SamplingParams(temperature=temperature, seed=n, max_tokens=20, ignore_eos=n % 2 == 0, top_k=12)
    return [Request(f"r{n}", COPIED[n:] if n % 2 else [n + 1, 9], params(n)) for n in range(5)]


@pytest.mark.parametrize(("overlap", "graphs"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafts", ["lookup", "the model itself", "another model"])
def test_the_text_is_the_text_without_it(drafts, temperature, overlap, graphs):
    expected = serve(make_engine(), some_requests(temperature))
    draft = {"lookup": None, "the model itself": decoder(), "another model": tiny.ours("qwen2").double()}[drafts]
    engine = make_engine(speculate=drafts, draft=draft, overlap=overlap, graphs=graphs, step_tokens=24)
    assert serve(engine, some_requests(temperature), check_pages) == expected
    check_empty(engine)
    stats = engine.stats()
    assert stats.drafted > 0
    if drafts == "the model itself":
        assert stats.accepted >= stats.drafted - 4  # it draws what the model will draw; one text ends within its drafts


def test_right_drafts_save_steps():
    plain, fast = make_engine(), make_engine(speculate="model", draft=decoder(), draft_tokens=4)
    for engine in (plain, fast):
        assert serve(engine, [greedy("r", [3, 5], 21)])["r"] == [alone([3, 5], 21)]
    assert plain.stats().steps == 21
    assert fast.stats().steps == 1 + 4


def test_a_pool_that_is_too_small_and_prefixes_that_are_shared():
    expected = serve(make_engine(), some_requests(0.9))
    engine = make_engine(speculate="model", draft=decoder(), pages=12, swap_memory=3000)
    assert serve(engine, some_requests(0.9), check_pages) == expected
    assert engine.stats().preemptions


def test_penalised_requests_do_without():
    penal = lambda: [Request("r", COPIED, SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.5))]
    engine = make_engine(speculate="lookup")
    assert serve(engine, penal()) == serve(make_engine(), penal())
    assert engine.stats().drafted == 0


def test_look_up_takes_what_followed_the_longest_ending():
    guess = LookUp(longest=3).guess
    assert guess([1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3], 3) == [9, 8, 2]  # after 1 2 3, though 2 3 came later too
    assert guess([2, 3, 5, 2, 3, 6, 4, 2, 3], 2) == [6, 4]  # the last time counts
    assert guess([5, 5, 5], 4) == [5]
    assert guess([1, 2, 3], 4) == []
    assert guess([1], 4) == []


def test_models_that_do_not_share_a_vocabulary_are_refused():
    with pytest.raises(ValueError, match="share a tokenizer"):
        make_engine(speculate="model", draft=tiny.ours("smollm2", vocab_size=50).double())
