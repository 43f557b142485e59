"""Steps as graphs: every step has a size that holds it, and all sizes are known beforehand."""

from contextlib import contextmanager

import pytest
import torch
from engines import make_engine, serve

from tilestack.engine import Request, SamplingParams
from tilestack.engine.captured import Size
from tilestack.engine.decoding import DecodingSteps
from tilestack.engine.reading import FEW, MOST, filled_up
from tilestack.engine.runner import Runner


def test_a_step_is_filled_up_by_an_eighth_at_most_where_it_is_long():
    for tokens in range(1, MOST + 1):
        size = filled_up(tokens)
        assert size >= tokens
        assert size <= 2 * tokens
        assert tokens <= 8 * FEW or size <= 1.25 * tokens
    assert filled_up(MOST) == MOST


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_all_sizes_are_known_beforehand(rows):
    engine = make_engine(max_sequences=rows, graphs=True, step_tokens=MOST)
    decoding, reading = engine.runner.captured
    assert [size.sequences for size in decoding.sizes()][-1] == rows
    known = set(reading.sizes())
    for tokens in range(1, MOST + 1):
        size = filled_up(tokens)
        for most in {size} if size <= FEW else {min(8, rows), rows}:
            assert Size(size, most) in known


def test_no_graph_is_for_more_tokens_than_a_step_takes():
    _, reading = make_engine(graphs=True, step_tokens=100).runner.captured
    assert max(size.tokens for size in reading.sizes()) == filled_up(100) == 128


def test_a_cpu_has_nothing_to_warm_up():
    told = []
    make_engine(graphs=True).runner.warm_up(lambda *progress: told.append(progress))
    assert told == []


def test_decoding_begins_with_the_longest_texts_and_each_gets_its_own_token(monkeypatch):
    prompts = dict(a=[1, 2], b=[3, 4, 5, 6, 7, 8, 9], c=[2, 3, 4])
    asked = [Request(name, ids, SamplingParams(temperature=0, max_tokens=5)) for name, ids in prompts.items()]
    launch, launched = DecodingSteps.launch, []

    def noting(self, parts):
        launched.append([part.start for part in parts])
        return launch(self, parts)

    monkeypatch.setattr(DecodingSteps, "launch", noting)
    assert serve(make_engine(graphs=True), asked) == serve(make_engine(graphs=False), asked)
    assert any(len(set(starts)) == 3 for starts in launched)
    assert all(starts == sorted(starts, reverse=True) for starts in launched)


def test_steps_begin_and_graphs_are_captured_on_the_models_device(monkeypatch):
    """Of several GPUs the current one may be another: an event recorded there says nothing of the model's work."""
    engine = make_engine(graphs=True)
    runner, inside, begun = engine.runner, [], []

    @contextmanager
    def on_device():
        inside.append(True)
        yield
        inside.pop()

    begin = runner.begin
    monkeypatch.setattr(runner, "on_device", on_device)
    monkeypatch.setattr(runner, "begin", lambda parts: (begun.append(bool(inside)), begin(parts))[1])
    for kind in runner.captured:
        monkeypatch.setattr(kind, "capture", lambda size: begun.append(bool(inside)))
    serve(engine, [Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=3))])
    served = len(begun)
    monkeypatch.setattr(runner, "device", torch.device("cuda", 1))
    runner.warm_up()
    assert 0 < served < len(begun)
    assert all(begun)
    assert Runner.on_device(runner).idx == 1
