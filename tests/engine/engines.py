"""A tiny model in float64, so that the order of sums decides nothing, and engines around it."""

import functools
from dataclasses import replace

import tiny_models as tiny
import torch

from tilestack import models
from tilestack.engine import Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.runner import len_of
from tilestack.engine.settings import bytes_of_token, cache_dtype


@functools.cache
def decoder(family="smollm2"):
    return tiny.ours(family).double()


def make_engine(*, pages=64, page=4, family="smollm2", draft=None, **settings):
    """An engine whose pool has so many pages."""
    model = decoder(family)
    made = EngineSettings(**(dict(page=page, max_sequences=8, step_tokens=16, queue=None, overlap=True) | settings))
    memory = pages * page * bytes_of_token(cache_dtype(made, torch.float64), model, draft)
    engine = Engine(model, None, replace(made, kv_memory=made.kv_memory or memory), draft=draft)
    launch = engine.runner.launch

    def within_limits(parts):
        assert 0 < sum(map(len_of, parts)) <= engine.scheduler.step_tokens
        assert len({part.sequence for part in parts}) == len(parts)
        for part in parts:
            assert part.start + len_of(part) < part.sequence.limit
            assert len(part.sequence.pages) == -(-(part.start + part.count + part.room) // page)
        step = launch(parts)
        for sequence in (part.sequence for part in parts):  # what the device reads is what the host has given
            assert engine.runner.tables[sequence.row, : len(sequence.pages)].tolist() == sequence.pages
        return step

    engine.runner.launch = within_limits
    return engine


def serve(engine, requests, after_step=lambda engine: None):
    """Every request's answers, token by token, served together."""
    for request in requests:
        engine.add(request)
    found = {request.id: [[] for _ in range(request.params.drawn)] for request in requests}
    while engine.busy:
        for request, delta in engine.step():
            assert delta.error is None, delta.error
            if request.id in found:
                found[request.id][delta.choice] += delta.ids
        after_step(engine)
    return found


def check_pages(engine):
    """No page is lost, none is anybody's twice, and whoever shares one reads the same tokens in it."""
    pool, running = engine.pool, engine.scheduler.running
    users = [0] * len(pool.users)
    for sequence in running:
        assert len(set(sequence.pages)) == len(sequence.pages)
        assert len(sequence.pages) * pool.page >= sequence.kept
        for page in sequence.pages:
            users[page] += 1
    assert users == pool.users
    assert users[0] == 0
    assert {page for page, count in enumerate(users) if not count and page} == set(pool.free)
    for page in {page for sequence in running for page in sequence.pages if users[page] > 1}:
        inside = {
            tuple(sequence.ids[(place := sequence.pages.index(page)) * pool.page : (place + 1) * pool.page])
            for sequence in running
            if page in sequence.pages
        }
        assert len(inside) == 1
        assert len(next(iter(inside))) == pool.page
    for key, page in pool.remembered.items():
        assert pool.contents[page][0] == key
        assert len(pool.contents[page][2]) == pool.page
    assert len(pool.contents) == len(pool.remembered)
    held = sum(sequence.swapped for sequence in engine.scheduler.waiting)
    of_a_token = bytes_of_token(
        engine.runner.cache.keys.dtype, engine.decoder, engine.runner.draft and engine.runner.draft[0]
    )
    assert engine.scheduler.swap_tokens + held == engine.settings.swap_memory // of_a_token
    assert engine.scheduler.swap_tokens >= 0
    rows = [sequence.row for sequence in running]
    assert sorted(rows + engine.scheduler.free_rows) == list(range(engine.settings.max_sequences))


def check_empty(engine):
    check_pages(engine)
    assert not engine.busy
    assert not engine.scheduler.running
    assert engine.pool.used == 0
    assert not engine.requests
    assert not engine.held
    assert not engine.runner.swapped
    assert not engine.runner.pooler.sums


def alone(prompt, count, family="smollm2"):
    """What greedy decoding in a contiguous cache of its own gives."""
    steps = models.generate(decoder(family), torch.tensor([prompt]), max_new_tokens=count)
    return [int(step[0]) for step in steps]


@torch.no_grad()
def vector_alone(text, pooling, family="smollm2"):
    """A text as a vector, by one forward over all of it."""
    states = decoder(family).hidden(torch.tensor(text))
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0).tolist()


def greedy(id, prompt, count, **params):
    return Request(id, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params))
