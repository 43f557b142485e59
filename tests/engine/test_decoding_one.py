"""When an engine decodes by a single kernel, with a step that stands in for the kernel's: which steps it is given, that the
tokens are the same, and what is told where there is none."""

import logging

import pytest
from engines import alone, check_empty, decoder, greedy, make_engine, serve

from tilestack.engine import Request, SamplingParams, decoding_one, persistent
from tilestack.engine.decoding_one import PersistentSteps
from tilestack.kernels.cuda.build import BuildError
from tilestack.models import PagedBatch


@pytest.fixture
def lengths(monkeypatch):
    """The lengths of texts that the stand-in was given, step by step."""
    given = []

    class StandIn:
        def __init__(self, runner):
            if reason := persistent.served_beside(runner):
                raise ValueError(reason)
            self.runner = runner

        def logits(self, ids, lengths, pages):
            assert ids.shape == lengths.shape == pages.shape[:1] == (1,)
            given.append(int(lengths))
            model, batch = self.runner.decoder, PagedBatch.decoding(self.runner.cache, pages, lengths)
            return model.logits(model.hidden(ids, context=batch))

    monkeypatch.setattr(persistent, "PersistentStep", StandIn)
    return given


def test_one_sequence_takes_it_unasked(lengths):
    engine = make_engine(graphs=True, overlap=False)
    assert serve(engine, [greedy("a", [1, 2, 3], 6)]) == {"a": [alone([1, 2, 3], 6)]}
    assert lengths == [4, 5, 6, 7, 8]  # the first token is the prompt's
    check_empty(engine)


def test_another_sequence_joins_and_leaves(lengths):
    engine = make_engine(graphs=True, overlap=False)
    engine.add(greedy("a", [1, 2, 3], 12))
    for _ in range(4):
        engine.step()
    before = list(lengths)
    found = serve(engine, [greedy("b", [5, 6], 4)])  # and the rest of a
    assert found == {"b": [alone([5, 6], 4)]}
    assert before == [4, 5, 6]
    together = 4  # steps of b, in which a has a token too
    assert lengths == [4, 5, 6, *range(7 + together, 15)]
    check_empty(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_other_steps_whenever_who_joins(lengths, overlap):
    draw = lambda n: SamplingParams(temperature=0.9, seed=n, max_tokens=3 + 4 * n, ignore_eos=True)
    asked = lambda: [Request(f"{n}", [n + 1, 2, 3], draw(n)) for n in range(4)]
    usual = serve(make_engine(graphs=True, decode="operators"), asked())
    assert not lengths
    assert serve(make_engine(graphs=True, overlap=overlap), asked()) == usual
    assert lengths


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_who_gives_way_is_cancelled_or_begins_as_another_did_gets_its_own_text(lengths, swap, overlap):
    engine = make_engine(graphs=True, overlap=overlap, swap_memory=swap, pages=8)
    engine.add(greedy("cancelled", [7, 8, 9], 20))
    steps = iter(range(100))
    cancel = lambda engine: engine.cancel("cancelled") if next(steps) == 5 else None
    asked = {"a": ([1, 2, 3], 18), "b": ([1, 2, 3, 4, 5], 14)}
    found = serve(engine, [greedy(name, *asked[name]) for name in asked], cancel)
    assert engine.stats().preemptions
    again = serve(engine, [greedy("c", [1, 2, 3, 4, 5, 6], 9)])  # its first page is there already
    assert found | again == {name: [alone(*asked[name])] for name in asked} | {"c": [alone([1, 2, 3, 4, 5, 6], 9)]}
    assert lengths
    check_empty(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_stay_the_same_beside_those_that_ask_for_more(lengths, overlap):
    """Who asks for what the tables do not hold ends early, and one who does not goes on by the single kernel."""
    more = [
        dict(logprobs=2),
        dict(presence_penalty=1.5),
        dict(min_tokens=4),
        dict(logit_bias={3: 4.0}),
        dict(stop_ids=[5, 6]),
    ]
    draw = lambda n, **asked: SamplingParams(temperature=0.9, seed=n, max_tokens=4, ignore_eos=True, **asked)
    asked = lambda: [Request(f"{n}", [n + 1, 2, 3], draw(n, **each)) for n, each in enumerate(more)]
    long = lambda: Request(
        "long", [9, 2], SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=24, ignore_eos=True)
    )
    usual = serve(make_engine(graphs=True, decode="operators"), [long(), *asked()])
    assert not lengths
    assert serve(make_engine(graphs=True, overlap=overlap), [long(), *asked()]) == usual
    assert len(lengths) > 10


def test_long_texts_are_left_to_the_operators_unless_it_was_asked_for(lengths, monkeypatch):
    monkeypatch.setattr(decoding_one, "LONGEST", 5)
    for decode, expected in ((None, [4, 5]), ("persistent", [4, 5, 6, 7])):
        engine = make_engine(graphs=True, overlap=False, decode=decode)
        assert serve(engine, [greedy("a", [1, 2, 3], 5)]) == {"a": [alone([1, 2, 3], 5)]}
        assert lengths == expected
        lengths.clear()


@pytest.mark.parametrize("asked", [dict(presence_penalty=0.5), dict(logprobs=1), dict(min_tokens=5), dict(logit_bias={3: 1.0})])  # fmt: skip
def test_what_the_tables_do_not_hold_is_for_other_steps(lengths, asked):
    serve(make_engine(graphs=True), [greedy("a", [1, 2, 3], 5, **asked)])
    assert not lengths


def test_guesses_are_read_by_other_steps(lengths):
    prompt = [1, 2, 3, 4] * 4
    found = serve(make_engine(graphs=True, speculate="lookup", overlap=False), [greedy("a", prompt, 8)])
    assert found == {"a": [alone(prompt, 8)]}
    usual = make_engine(graphs=True, decode="operators", speculate="lookup", overlap=False)
    assert serve(usual, [greedy("a", prompt, 8)]) == found


@pytest.mark.parametrize("settings", [dict(decode="operators", graphs=True), dict(batch_invariant=True, graphs=True), dict(graphs=False)])  # fmt: skip
def test_it_is_not_even_made(settings, monkeypatch):
    def never(runner):
        raise AssertionError("a step was made")

    monkeypatch.setattr(persistent, "PersistentStep", never)
    engine = make_engine(**settings)
    assert not any(isinstance(kind, PersistentSteps) for kind in engine.runner.captured)
    assert serve(engine, [greedy("a", [1, 2, 3], 3)]) == {"a": [alone([1, 2, 3], 3)]}


def test_a_model_that_drafts_is_a_reason(lengths, caplog):
    with caplog.at_level(logging.INFO, "tilestack.engine.decoding_one"):
        engine = make_engine(graphs=True, draft=decoder(), speculate="a model")
    assert [record.message for record in caplog.records] == [
        "decoding is not persistent: a smaller model drafts, and has to read every token too"
    ]
    assert not any(isinstance(kind, PersistentSteps) for kind in engine.runner.captured)


@pytest.mark.parametrize(
    ("problem", "unasked", "told"),
    [
        (ValueError("the model has experts"), logging.INFO, "decoding is not persistent: the model has experts"),
        (
            BuildError("decode_step.cu did not compile:\nin line 3\nerror: no\nerror: nor this"),
            logging.WARNING,
            "decoding is not persistent, which is slower: decode_step.cu did not compile: error: no",
        ),
        (OSError("no space left"), logging.WARNING, "decoding is not persistent, which is slower: no space left"),
    ],
    ids=["refused", "not compiled", "not stored"],
)
@pytest.mark.parametrize("decode", [None, "persistent"])
def test_where_there_is_none_one_line_says_why(problem, unasked, told, decode, monkeypatch, caplog):
    def fails(runner):
        raise problem

    monkeypatch.setattr(persistent, "PersistentStep", fails)
    with caplog.at_level(logging.INFO, "tilestack.engine.decoding_one"):
        engine = make_engine(graphs=True, decode=decode)
    (record,) = caplog.records
    assert (record.levelno, record.message) == (logging.WARNING if decode else unasked, told)
    assert serve(engine, [greedy("a", [1, 2, 3], 3)]) == {"a": [alone([1, 2, 3], 3)]}
