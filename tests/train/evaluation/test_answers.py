"""Answers: the same whoever answers beside, in batches by tokens rather than by exact lengths."""

import pytest
import torch
from small import decoder, tokenizer

from tilestack.train.evaluation import answers as module
from tilestack.train.evaluation.answers import answers, batches

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


def test_prompts_of_like_length_share_a_batch_up_to_a_budget_of_tokens():
    lengths = [10, 12, 11, 100, 14, 13, 101]
    assert sorted(map(sorted, batches(lengths, 8))) == [[0, 1, 2, 4, 5], [3, 6]]
    assert [len(batch) for batch in batches([10] * 7, 10, budget=60)] == [3, 3, 1]
    assert [len(batch) for batch in batches([1000], 10, budget=60)] == [1]  # what is too large goes alone
    assert list(batches([], 8)) == []


def test_sixteen_lengths_take_as_many_forwards_as_one_and_their_spread(monkeypatch):
    forwards = []
    model = decoder()
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, **more: forwards.append(ids.shape) or hidden(ids, **more))
    prompts = [[7] * size for size in range(20, 36)]
    answers(model, prompts, max_new_tokens=32, stop=())
    assert len(forwards) == 32 + 15
    assert sum(rows for rows, _ in forwards) == 16 * len(forwards)
    assert module.BUDGET > 16 * 67


@pytest.mark.parametrize("stop", [(), STOPS])
def test_an_answer_ends_with_what_stopped_it(stop):
    (answer,) = answers(decoder(), [[5, 6]], max_new_tokens=5, stop=stop)
    assert all(token not in stop for token in answer[:-1])
