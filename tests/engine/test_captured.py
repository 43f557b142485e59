"""Steps as graphs: every step has a size that holds it, and all sizes are known beforehand."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from engines import greedy, make_engine, serve
from hypothesis import given
from hypothesis import strategies as st

from tilestack.engine import LLM, Request, SamplingParams
from tilestack.engine.captured import Size
from tilestack.engine.decoding import DecodingSteps
from tilestack.engine.reading import FEW, MOST, ReadingSteps, filled_up
from tilestack.engine.runner import Runner, len_of
from tilestack.engine.scheduler import Part
from tilestack.models import PagedBatch


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


@given(st.data())
def test_the_host_finds_the_places_that_the_device_would(data):
    """Of chunks, single tokens and guesses, in pages that lie anywhere."""
    page, sequences = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    runner = SimpleNamespace(cache=SimpleNamespace(page=page, longest=None), nobody=sequences + 1)
    kind, numbers = ReadingSteps(runner, sequences, 256), iter(data.draw(st.permutations(range(1, 400))))
    parts = []
    for row in data.draw(st.permutations(range(sequences))):
        start, count, drafts = (data.draw(st.integers(low, high)) for low, high in ((0, 20), (1, 12), (0, 3)))
        unread = data.draw(st.booleans())
        pages = [next(numbers) for _ in range(-(-(start + count + drafts) // page))]
        ids = [100 + place for place in range(start + count - unread)]
        sequence = SimpleNamespace(ids=ids, row=row, pages=pages, seed=2**61 + 2 * row + 1)
        parts.append(Part(sequence, start, count, data.draw(st.booleans()) or drafts > 0, 3, drafts, [7] * drafts))
    tokens = sum(map(len_of, parts))
    size = Size(tokens + 3, tokens + 1)
    told = torch.from_numpy(kind.inputs(parts, size))
    ids, sources, owners, positions, slots, rows, lengths, cu_queries, places, place_rows, seeds = told.split(
        [size.tokens] * 5 + [size.sequences] * 2 + [size.sequences + 1] + [size.sequences] * 3
    )
    tables = torch.zeros(size.sequences, 64, dtype=torch.int64)
    for number, part in enumerate(parts):
        tables[number, : len(part.sequence.pages)] = torch.tensor(part.sequence.pages)
    batch = PagedBatch(runner.cache, tables, lengths, cu_queries, size.tokens, size.tokens)
    assert positions.equal(batch.positions)
    assert slots.equal(batch.slots)
    assert owners.equal(batch.sequences)
    assert rows[: len(parts)].tolist() == [part.sequence.row for part in parts]
    last = torch.cat([torch.arange(sequences + 1) + 1000, torch.tensor([-1])])  # drawn in each row; nobody's
    read = lambda part: part.sequence.ids[part.start :]
    expected: list[int] = []
    for part in parts:
        expected += read(part) + [1000 + part.sequence.row] * (part.count - len(read(part))) + part.drafts
    assert torch.maximum(ids, last[sources])[:tokens].tolist() == expected
    drawing = [(part, place) for part in parts if part.draws for place in range(len(part.drafts) + 1)]
    assert seeds[: len(drawing)].tolist() == [part.sequence.seed + 3 + place for part, place in drawing]
    assert place_rows[: len(drawing)].tolist() == [part.sequence.row for part, _ in drawing]
    ends = dict(zip(map(id, parts), cu_queries[1:].tolist(), strict=False))
    assert places[: len(drawing)].tolist() == [ends[id(part)] - len(part.drafts) - 1 + n for part, n in drawing]


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


def test_what_decoding_is_filled_up_with_is_kept_nowhere():
    """Five sequences are filled up to eight; three tokens in one place would be refused."""
    asked = lambda: [greedy(f"r{n}", [n + 1, 2], 5) for n in range(5)]
    engine = make_engine(graphs=True)
    assert serve(engine, asked()) == serve(make_engine(graphs=False), asked())
    assert not engine.runner.cache.keys[:, 0].any()


ASKING = {
    "penalties": dict(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "logprobs": dict(logprobs=3),
    "bias": dict(logit_bias={3: 4.0, 7: -100.0}),
    "min_tokens": dict(min_tokens=6, stop_ids=tuple(range(0, 97, 2))),
    "best": dict(best_of=3),
}


def asked(temperature, **more):
    """Requests that ask for one thing each, among some that ask for nothing."""
    sampling = dict(temperature=temperature, max_tokens=9, ignore_eos=True, top_p=0.95)
    plain = [Request(f"{n}", [n + 1, 2, 3], SamplingParams(**sampling, seed=n)) for n in range(3)]
    return plain + [
        Request(name, [5, 6, len(name)], SamplingParams(**sampling, seed=7, **each))
        for name, each in (ASKING | more).items()
    ]


def told(engine, requests):
    """Tokens and log-probabilities of all answers."""
    outputs = LLM(engine).run(requests)
    assert all(answer.error is None for output in outputs for answer in output.completions)
    return {
        output.id: ([answer.ids for answer in output.completions], [[(each.id, each.top) for each in answer.logprobs] for answer in output.completions])
        for output in outputs
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("settings", [{}, dict(overlap=False), dict(pages=12), dict(speculate="lookup"), dict(kv_dtype="int8")])  # fmt: skip
def test_who_asks_for_more_than_the_tables_hold_gets_it_and_others_their_own(temperature, settings, monkeypatch):
    usual = told(make_engine(max_sequences=6, **settings), asked(temperature))
    engine = make_engine(graphs=True, max_sequences=6, **settings)
    monkeypatch.setattr(engine.runner, "forward", None)  # all steps are captured ones
    found = told(engine, asked(temperature))
    as_ids = lambda answers: {name: (ids, [[(id, [t for t, _ in top]) for id, top in each] for each in logprobs]) for name, (ids, logprobs) in answers.items()}  # fmt: skip
    assert as_ids(found) == as_ids(usual)
    for name in usual:
        for ours, theirs in zip(found[name][1], usual[name][1], strict=True):
            values = lambda each: torch.tensor([[value for _, value in top] for _, top in each])
            torch.testing.assert_close(values(ours), values(theirs))
    if temperature == 0:
        plain = told(make_engine(), asked(temperature)[:3])
        assert {name: found[name] for name in plain} == plain


def test_only_those_who_ask_are_drawn_again(monkeypatch):
    engine = make_engine(graphs=True)
    draw, again = engine.runner.draw, []

    def noting(draws, hidden):
        assert len(hidden) == len(draws.sequences)
        again.append([sequence.request.id for sequence in draws.sequences])
        return draw(draws, hidden)

    monkeypatch.setattr(engine.runner, "draw", noting)
    params = dict(temperature=0, max_tokens=6, ignore_eos=True)
    plain = [Request(f"{n}", [n + 1, 2], SamplingParams(**params)) for n in range(3)]
    early = Request("early", [5, 6], SamplingParams(**params, min_tokens=2))
    serve(engine, [*plain, early, Request("biased", [7], SamplingParams(**params, logit_bias={3: 1.0}))])
    assert [ids.count("early") for ids in again] == [1, 1, 0, 0, 0, 0]
    assert [ids.count("biased") for ids in again] == [1] * 6
    assert not any(request.id in ids for ids in again for request in plain)


def test_log_probabilities_of_prompts_are_read_kernel_by_kernel_and_the_answer_is_not(monkeypatch):
    request = lambda: Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1))
    usual = make_engine()
    (output,) = LLM(usual).run([request()])
    engine = make_engine(graphs=True)
    forward, read = engine.runner.forward, []
    monkeypatch.setattr(
        engine.runner, "forward", lambda parts, *rest: (read.append(len(parts)), forward(parts, *rest))[1]
    )
    (found,) = LLM(engine).run([request()])
    assert found == output
    assert read == [1]


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
