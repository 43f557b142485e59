"""What goes wrong for one stays with one, and what the device has not written yet is not read."""

import math
import sys

import numpy as np
import pytest
import torch
from engines import alone, check_empty, check_pages, decoder, greedy, make_engine, serve

from tilestack.engine import LLM, Request, RequestError, SamplingParams, Structure
from tilestack.engine.structure import StructureFailed
from tilestack.engine.text import TextStream

PROMPT = [3, 5, 7, 11, 13, 5, 5, 2, 9]


class LateHost:
    """Host memory as a GPU writes it: after the launch, and surely there only when the step's event was waited for."""

    def __init__(self, runner, monkeypatch):
        self.pending = []
        monkeypatch.setattr(runner, "to_host", self.to_host)
        monkeypatch.setattr(runner, "record", self.record)

    def to_host(self, values):
        late = torch.full_like(values, -7 if not values.is_floating_point() else math.nan)
        self.pending.append((late, values.clone()))
        return late

    def record(self):
        copies, self.pending = self.pending, []
        return type("Event", (), {"synchronize": lambda _: [late.copy_(values) for late, values in copies]})()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("speculate", [None, "lookup"])
def test_nothing_is_read_before_the_device_has_written_it(monkeypatch, graphs, speculate):
    def ask():
        requests = [
            Request(f"r{n}", PROMPT[n:], SamplingParams(temperature=0, max_tokens=9, n=2, logprobs=n % 3 or None, prompt_logprobs=n % 2 or None))
            for n in range(5)
        ]  # fmt: skip
        engine = make_engine(graphs=graphs, speculate=speculate)
        return engine, requests

    engine, requests = ask()
    expected = serve(engine, requests)
    late_engine, late = ask()
    LateHost(late_engine.runner, monkeypatch)
    assert serve(late_engine, late) == expected
    assert [request.prompt_logprobs for request in late] == [request.prompt_logprobs for request in requests]


class PoisonedFor:
    """A model that gives NaN wherever a token stands, as long as it is broken."""

    def __init__(self, token):
        self.token, self.broken = token, True

    def __getattr__(self, name):
        return getattr(decoder(), name)

    def hidden(self, ids, **named):
        assert (ids >= 0).all()  # no token is -1, which stands for none
        found = decoder().hidden(ids, **named)
        return torch.where((ids == self.token)[:, None], torch.nan, found) if self.broken else found


@pytest.mark.parametrize(("overlap", "graphs"), [(True, False), (True, True), (False, False)])
def test_logits_that_are_not_finite_end_one_sequence_alone(overlap, graphs):
    engine = make_engine(overlap=overlap, graphs=graphs)
    engine.runner.decoder = model = PoisonedFor(96)
    sick, well = [4] * 12 + [96], [4] * 12 + [5]
    for request in (greedy("well", well, 8), greedy("sick", sick, 8)):
        engine.add(request)
    ends, made = {}, {"well": [], "sick": []}
    while engine.busy:
        for request, delta in engine.step():
            made[request.id] += delta.ids
            ends[request.id] = delta
        check_pages(engine)
    assert made == {"well": alone(well, 8), "sick": []}
    assert ends["well"].error is None
    assert "not finite" in ends["sick"].error
    check_empty(engine)
    model.broken = False
    again = greedy("again", [*sick, 1, 2, 3], 4)
    assert serve(engine, [again])["again"] == [alone(again.prompt, 4)]
    assert again.cached <= 12


def test_a_step_that_breaks_once_while_another_is_in_flight(monkeypatch):
    for broken_at in range(1, 9):
        engine = make_engine(speculate="lookup" if broken_at % 2 else None, step_tokens=6)
        for n in range(3):
            engine.add(greedy(f"r{n}", PROMPT[n:], 6))
        launch, count, ends = engine.runner.launch, 0, {}

        def broken(parts):
            nonlocal count
            count += 1
            if count == broken_at:
                launch(parts)
                raise RuntimeError("broken once")
            return launch(parts)

        monkeypatch.setattr(engine.runner, "launch", broken)
        while engine.busy:
            ends |= {request.id: delta for request, delta in engine.step() if delta.finish}
            check_pages(engine)
        assert len(ends) == 3
        assert any(delta.error for delta in ends.values())
        check_empty(engine)
        assert not engine.pool.remembered or all(
            page in engine.pool.contents for page in engine.pool.remembered.values()
        )
        found = serve(engine, [greedy(f"again{n}", PROMPT[n:], 6) for n in range(3)])
        assert found == {f"again{n}": [alone(PROMPT[n:], 6)] for n in range(3)}


def test_an_error_in_one_of_many_prompts_leaves_the_engine_empty():
    engine = make_engine()
    engine.runner.decoder = PoisonedFor(96)
    with pytest.raises(RuntimeError, match="request 1 failed: the model's logits are not finite"):
        LLM(engine).generate([[4, 5], [4, 96], [6, 7]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert not engine.requests
    serve(engine, [])  # what was in flight
    check_empty(engine)


def test_an_answer_whose_text_cannot_be_read_fails_alone(monkeypatch):
    class Refuses(TextStream):
        def add(self, token, stops_count=True):
            raise ValueError("no such piece")

    engine = make_engine()
    sick, well = greedy("sick", [4, 5], 8), greedy("well", [6, 7], 8)
    engine.add(sick)
    engine.add(well)
    sick.sequences[0].text = Refuses(None)
    ends, made = {}, []
    while engine.busy:
        for request, delta in engine.step():
            ends[request.id] = delta
            made += delta.ids if request is well else ()
    assert "no such piece" in ends["sick"].error
    assert made == alone([6, 7], 8)
    check_empty(engine)


class Fails:
    """A grammar that allows any token but has become too large, at its first token or at its third."""

    def __init__(self, allows):
        self.left, self.allows, self.problem = 3, allows, None

    def allowed(self):
        self.problem = None if self.left > 1 or self.allows else "too many items"
        return np.full(decoder().config.vocabulary, self.problem is None)

    def accept(self, token):
        self.left -= 1
        if not self.left:
            raise StructureFailed("the structure is too complex: too many items")
        return True


@pytest.mark.parametrize("allows", [True, False])
def test_a_grammar_that_fails_is_of_the_request_and_not_of_the_engine(monkeypatch, caplog, allows):
    engine = make_engine()
    monkeypatch.setattr(engine.structures, "matcher", lambda structure: Fails(allows) if structure else None)
    sick, well = greedy("sick", [4, 5], 8, structure=Structure("json")), greedy("well", [6, 7], 8)
    with pytest.raises(RequestError, match="too complex: too many items"):
        LLM(engine).run([sick, well])
    serve(engine, [])  # what was in flight
    check_empty(engine)
    assert not caplog.records  # nothing to look after for whoever runs the engine


def best_of_three(spoil):
    engine = make_engine()
    request = Request("r", PROMPT, SamplingParams(seed=4, max_tokens=6, ignore_eos=True, best_of=3))
    engine.add(request)
    news = []
    while engine.busy:
        news += engine.step()
        news += spoil(engine, request)
    check_empty(engine)
    return [delta for _, delta in news]


def test_the_best_of_several_is_one_that_came_to_its_end():
    whole = best_of_three(lambda engine, request: [])
    assert [delta.finish for delta in whole] == ["length"]
    good = [
        best_of_three(lambda engine, request, choice=choice: engine.end([request.sequences[choice]], "error", "spoilt"))
        for choice in range(3)
    ]
    for (delta,) in good:
        assert (delta.finish, delta.error) == ("length", None)
        assert len(delta.ids) == 6
    assert sum(delta.ids == whole[0].ids for (delta,) in good) == 2
    (delta,) = best_of_three(lambda engine, request: engine.end(request.sequences[:2], "error", "spoilt"))
    assert delta.finish == "length"


def test_a_request_can_be_added_again_when_it_has_ended():
    engine, request = make_engine(), greedy("r", PROMPT, 5, prompt_logprobs=0)
    first = serve(engine, [request])
    assert serve(engine, [request]) == first == {"r": [alone(PROMPT, 5)]}
    assert engine.usage(request).completion == 5
    assert len(request.prompt_logprobs) == len(PROMPT)


def test_what_a_step_that_broke_did_not_compute_is_not_found(monkeypatch):
    engine, shared = make_engine(), list(range(1, 22))
    first = greedy("first", PROMPT, 12)
    engine.add(first)
    for _ in range(3):
        engine.step()

    def broken(parts):
        raise RuntimeError("broken before anything was computed")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "launch", broken)
        engine.add(greedy("lost", shared, 4))
        ends = {request.id: delta.error for request, delta in engine.step() if delta.finish}
    assert ends.keys() == {"first", "lost"}
    again = greedy("again", shared, 4)
    assert serve(engine, [again], check_pages)["again"] == [alone(shared, 4)]
    assert again.cached == 0
    check_empty(engine)


def ends_of(engine, steps=200):
    """How each request ended, within so many steps."""
    ends = {}
    for _ in range(steps):
        ends |= {request.id: delta for request, delta in engine.step() if delta.finish}
        check_pages(engine)
        if not engine.busy:
            break
    check_empty(engine)
    return ends


def test_pages_with_what_is_not_finite_are_not_found():
    engine = make_engine()
    engine.runner.decoder = model = PoisonedFor(96)
    sick = [4, 4, 4, 96, *[4] * 9]
    engine.runner.decoder.hidden = lambda ids, **named: (
        decoder().hidden(ids, **named) * (torch.nan if model.broken else 1)
    )
    engine.add(greedy("sick", sick, 4))
    assert "not finite" in ends_of(engine)["sick"].error
    model.broken = False
    again = greedy("again", sick, 4)
    assert serve(engine, [again])["again"] == [alone(sick, 4)]
    assert again.cached == 0


def test_a_step_that_cannot_be_read_takes_those_in_the_one_behind_it_along(monkeypatch):
    engine = make_engine()
    engine.add(greedy("first", PROMPT, 9))
    engine.step()
    engine.add(greedy("second", [4, 5], 9))

    def broken(step):
        raise RuntimeError("cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr("tilestack.engine.runner.Step.read", broken)
        news = engine.step()
    ends = {request.id: delta.error for request, delta in news if delta.finish} | {
        id: delta.error for id, delta in ends_of(engine).items()
    }
    assert ends.keys() == {"first", "second"}
    assert all("cannot be read" in error for error in ends.values())


def test_who_gives_way_in_a_step_that_cannot_copy_ends_with_it(monkeypatch):
    engine = make_engine(max_sequences=1, swap_memory=1 << 20)
    late = greedy("late", PROMPT, 9)
    late.priority = 1
    engine.add(late)
    engine.step()
    engine.add(greedy("urgent", [4, 5], 3))

    def broken(plan):
        raise RuntimeError("cannot be copied")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "swap", broken)
        news = engine.step()
    ends = {request.id: delta.error for request, delta in news if delta.finish}
    assert ends.keys() == {"late", "urgent"}
    assert not ends_of(engine)


def interrupted_at(call, work):
    """Run some work that is interrupted, as by Ctrl-C, when the engine makes its so-many-th call; whether it was."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        if event == "call" and "tilestack/engine/" in frame.f_code.co_filename:
            calls += 1
            if calls == call:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_nothing_is_believed_of_a_step_that_was_interrupted(swap):
    """Its pages would be found under what they were to hold, and a conversation that goes on would read them."""
    call, interrupted, shared = 0, True, list(range(1, 22))
    while interrupted:
        call += 83
        engine = make_engine(pages=14, swap_memory=swap, speculate="lookup")
        serve(engine, [greedy("before", PROMPT, 3)])
        for n in range(4):
            engine.add(greedy(f"r{n}", [*shared, n], 9))

        def some_steps(engine=engine):
            for _ in range(8):
                engine.step()

        interrupted = interrupted_at(call, some_steps)
        for n in range(4):  # as whoever is interrupted does
            engine.cancel(f"r{n}")
        if interrupted:
            for prompt in (shared, PROMPT):
                assert serve(engine, [greedy("again", prompt, 4)], check_pages)["again"] == [alone(prompt, 4)]
            check_empty(engine)
    assert call > 300
