"""Answers: the same whoever answers beside, whatever their lengths."""

import pytest
import torch
from small import decoder, tokenizer

from tilestack.train.evaluation import answers as module
from tilestack.train.evaluation.answers import answers

STOPS = tokenizer().stops


def test_greedy_answers_do_not_depend_on_company():
    torch.manual_seed(0)
    prompts = [torch.randint(3, 280, (size,)).tolist() for size in (4, 9, 4, 30, 11, 5)]
    together = answers(decoder(), prompts, max_new_tokens=7, stop=STOPS)
    alone = [answers(decoder(), [prompt], max_new_tokens=7, stop=STOPS)[0] for prompt in prompts]
    assert together == alone
    assert all(1 <= len(answer) <= 7 for answer in together)


def test_what_is_drawn_follows_from_the_seed():
    prompts = [[5, 6, 7], [5, 6, 7, 8], [9]]
    draw = lambda seed: answers(decoder(), prompts, max_new_tokens=6, stop=(), temperature=1.0, seed=seed)
    assert draw(1) == draw(1) != draw(2)
    assert all(len(answer) == 6 for answer in draw(1))


def test_sixteen_lengths_take_as_many_forwards_as_one(monkeypatch):
    model, forwards = decoder(), []
    embedded = model.embedded
    monkeypatch.setattr(model, "embedded", lambda ids: forwards.append(ids.numel()) or embedded(ids))
    prompts = [[7] * size for size in range(20, 36)]
    answers(model, prompts, max_new_tokens=32, stop=())
    assert len(forwards) == 32
    assert forwards[1:] == [16] * 31


def test_equal_prompts_are_read_once(monkeypatch):
    model, forwards = decoder(), []
    embedded = model.embedded
    monkeypatch.setattr(model, "embedded", lambda ids: forwards.append(ids.numel()) or embedded(ids))
    found = answers(model, [[7, 8] * 20] * 4, max_new_tokens=3, stop=(), temperature=1.0)
    assert forwards == [40 + 3 * 8, 4, 4]  # two of the three pages are shared
    assert len({tuple(answer) for answer in found}) > 1


def test_memory_for_a_few_at_a_time_is_enough(monkeypatch):
    prompts = [[n + 3] * 9 for n in range(20)]
    whole = answers(decoder(), prompts, max_new_tokens=12, stop=())
    monkeypatch.setattr(module, "BUDGET", 64)
    assert answers(decoder(), prompts, max_new_tokens=12, stop=()) == whole


@pytest.mark.parametrize("stop", [(), STOPS])
def test_an_answer_ends_with_what_stopped_it(stop):
    (answer,) = answers(decoder(), [[5, 6]], max_new_tokens=5, stop=stop)
    assert all(token not in stop for token in answer[:-1])


def test_an_answer_ends_where_the_model_reads_no_further():
    model = decoder()
    positions = model.config.positions
    (answer,) = answers(model, [[5] * (positions - 3)], max_new_tokens=50, stop=())
    assert len(answer) == 3
