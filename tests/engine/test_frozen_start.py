"""The garbage collector beside an engine: on a GPU it walks what steps make, and nothing of what was there before."""

import asyncio
import gc

import pytest
import torch
from engines import make_engine

from tilestack.engine import LLM, AsyncEngine, Request, SamplingParams
from tilestack.garbage import startup_frozen

CUDA = torch.device("cuda")  # its name; what is tried here is the host's
PARAMS = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture
def watched(monkeypatch):
    """An engine that seems to be on a GPU, and how much was frozen in each of its steps."""
    engine, frozen = make_engine(), []
    step = engine.step

    def noting():
        engine.runner.device = torch.device("cpu")
        frozen.append(gc.get_freeze_count())
        try:
            return step()
        finally:
            engine.runner.device = CUDA

    monkeypatch.setattr(engine, "step", noting)
    engine.runner.device = CUDA
    return engine, frozen


def test_many_prompts_are_answered_beside_a_frozen_start(watched):
    (engine, frozen), before = watched, gc.get_freeze_count()
    LLM(engine).run([Request("a", [1, 2], PARAMS)])
    assert min(frozen) > before + 10_000
    assert gc.get_freeze_count() <= before


def test_so_are_streams(watched):
    (engine, frozen), before = watched, gc.get_freeze_count()

    async def ask():
        async with AsyncEngine(engine) as running:
            return [delta async for delta in running.submit([1, 2], PARAMS)]

    assert asyncio.run(ask())
    assert min(frozen) > before + 10_000
    assert gc.get_freeze_count() <= before


def test_one_inside_another_thaws_nothing():
    """As a request's does that is answered while prompts are."""
    before = gc.get_freeze_count()
    with startup_frozen(CUDA):
        with startup_frozen(CUDA):
            pass
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() <= before


def test_beside_a_cpu_nothing_is_frozen():
    before = gc.get_freeze_count()
    with startup_frozen(torch.device("cpu")):
        assert gc.get_freeze_count() <= before
