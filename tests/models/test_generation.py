"""Generation: greedy is the argmax of whole forwards, sampling follows its settings, rows end by themselves."""

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models.generate import Sampler


def rows(decoder, ids, **options):
    return torch.stack(list(models.generate(decoder, ids, **options)), 1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["smollm2", "mistral", "qwen3_moe", "deepseek_v2", "gemma2", "gemma3", "granite"])
def test_greedy_tokens_are_those_of_whole_forwards(family):
    decoder, ids = tiny.ours(family), tiny.ids(tokens=5)
    found = rows(decoder, ids, max_new_tokens=12)
    whole = ids
    for _ in range(12):
        whole = torch.cat((whole, decoder(whole)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, whole[:, 5:])


def test_sampling_is_reproducible_and_varied():
    decoder, ids = tiny.ours("smollm2"), tiny.ids(tokens=5)
    draw = lambda seed, **options: rows(decoder, ids, max_new_tokens=16, temperature=1.0, seed=seed, **options)
    assert torch.equal(draw(1), draw(1))
    assert torch.equal(draw(1)[:1], rows(decoder, ids[:1], max_new_tokens=16, temperature=1.0, seed=1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(draw(1)[:, :8], draw(1)[:, 8:])
    assert torch.equal(draw(1, top_k=1), rows(decoder, ids, max_new_tokens=16))
    assert torch.equal(draw(1, top_p=1e-6), rows(decoder, ids, max_new_tokens=16))
    assert torch.equal(draw(1, min_p=1.0), rows(decoder, ids, max_new_tokens=16))


def test_every_step_draws_with_noise_of_its_own():
    sampler = Sampler(4, torch.device("cpu"), temperature=1.0)
    first, second = (sampler(torch.zeros(4, 1000)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_row_ends_at_its_stop_and_the_others_go_on():
    decoder, ids = tiny.ours("smollm2"), tiny.ids(tokens=5)
    free = rows(decoder, ids, max_new_tokens=20, temperature=1.0, seed=3)
    first, last = int(free[0, 4]), int(free[1, 9])
    found = rows(decoder, ids, max_new_tokens=20, temperature=1.0, seed=3, stop=[first, last])
    ends = [min(free[row].tolist().index(stop) for stop in (first, last) if stop in free[row]) for row in range(2)]
    assert found.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        assert torch.equal(found[row, : end + 1], free[row, : end + 1])
        assert bool((found[row, end:] == found[row, end]).all())


def test_what_is_generated_can_be_trained_on():
    decoder, ids = tiny.ours("smollm2"), tiny.ids(tokens=5)
    made = rows(decoder, ids, max_new_tokens=3)
    decoder(made).sum().backward()
    assert bool(decoder.embedding.weight.grad.any())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature must lie between 0.0 and inf, not -1.0"),
        (dict(top_p=1.5), "top_p must lie between"),
        (dict(top_k=-1), "top_k must lie between"),
        (dict(min_p=2.0), "min_p must lie between"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        next(models.generate(tiny.ours("smollm2"), tiny.ids(), max_new_tokens=1, **options))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        next(models.generate(tiny.ours("smollm2"), torch.zeros(1, 0, dtype=torch.long), max_new_tokens=1))
