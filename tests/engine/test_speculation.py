"""Speculation changes how many steps there are and nothing else."""

import pytest
import tiny_models as tiny
import torch
from engines import alone, check_empty, check_pages, decoder, greedy, make_engine, serve
from hypothesis import given
from hypothesis import strategies as st

from tilestack.engine import Request, SamplingParams
from tilestack.engine.scheduler import Part
from tilestack.engine.settings import bytes_of_token
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


def test_a_text_that_ends_soon_costs_the_others_no_guesses():
    engine = make_engine(speculate="model", draft=decoder(), draft_tokens=4)
    found = serve(engine, [greedy("short", [7, 9], 4), greedy("long", [3, 5], 21), greedy("other", [4, 6], 3)])
    assert found == {"short": [alone([7, 9], 4)], "long": [alone([3, 5], 21)], "other": [alone([4, 6], 3)]}
    assert engine.stats().steps == 1 + 4


def test_every_token_that_comes_of_a_step_has_its_own_log_probabilities():
    told = []
    for settings in ({}, dict(speculate="model", draft=decoder(), draft_tokens=4)):
        engine, found = make_engine(**settings), []
        engine.add(greedy("r", [3, 5], 21, logprobs=2))
        while engine.busy:
            found += [each for _, delta in engine.step() for each in delta.logprobs]
        told.append(found)
    plain, fast = told
    assert [each.id for each in fast] == [each.id for each in plain] == alone([3, 5], 21)
    assert [each.logprob for each in fast] == pytest.approx([each.logprob for each in plain], abs=1e-5)
    assert [[token for token, _ in each.top] for each in fast] == [[token for token, _ in each.top] for each in plain]


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


def looked_up(ids, count, **limits):
    """The look-up through the interface that the engine uses, its text given in two pieces."""
    drafter, sequence = LookUp(**limits), greedy("r", ids, 9)
    for end in (len(ids) // 2, len(ids)):
        sequence.ids = ids[:end]
        part = Part(sequence, 0, 1, True, 1, room=count)
        drafter.fill([part])
    return part.drafts


def test_look_up_takes_what_followed_the_longest_ending():
    guess = lambda ids, count: looked_up(ids, count, longest=3)
    assert guess([1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3], 3) == [9, 8, 2]  # after 1 2 3, though 2 3 came later too
    assert guess([2, 3, 5, 2, 3, 6, 4, 2, 3], 2) == [6, 4]  # the last time counts
    assert guess([5, 5, 5], 4) == [5, 5, 5, 5]  # what repeats itself goes on
    assert guess([9, 1, 2, 3, 1, 2, 3, 1], 5) == [2, 3, 1, 2, 3]
    assert guess([1, 2, 3], 4) == []
    assert guess([1], 4) == []


@given(
    ids=st.lists(st.sampled_from([0, 1, 256, 65536, 257]), min_size=1, max_size=24),  # whose bytes overlap
    count=st.integers(1, 5),
    longest=st.integers(1, 4),
    window=st.integers(2, 30),
)
def test_look_up_is_by_tokens_within_its_window(ids, count, longest, window):
    seen = ids[-window:]
    expected = []
    for size in range(min(longest, len(seen) - 1), 0, -1):
        places = [place for place in range(len(seen) - size) if seen[place : place + size] == seen[-size:]]
        if places:
            followed = seen[places[-1] + size :]
            expected = [followed[n % len(followed)] for n in range(count)]
            break
    assert looked_up(ids, count, longest=longest, window=window) == expected


def test_guesses_share_the_tokens_of_a_step():
    """One that finds nothing leaves its share to the others, and a step that is full already has none."""
    repeats, new = greedy("a", [5] * 9, 9), greedy("b", [1, 2, 3], 9)
    for sequence in (repeats, new):
        sequence.ids = sequence.prompt
    filled = lambda parts, **limits: LookUp(**limits).fill(parts) or [len(part.drafts) for part in parts]
    parts = lambda *sequences, room=8: [Part(each, 0, 1, True, 1, room=room) for each in sequences]
    assert filled(parts(repeats, repeats, repeats)) == [8, 8, 8]
    assert filled(parts(repeats, repeats, repeats), step_tokens=64) == [8, 8, 8]
    assert filled(parts(repeats, repeats, repeats), step_tokens=13) == [3, 3, 4]
    assert filled(parts(new, repeats), step_tokens=9) == [0, 7]
    assert filled(parts(repeats, repeats, room=1), step_tokens=9) == [1, 1]
    prompt = Part(new, 0, 64, True, 1)
    assert filled([*parts(repeats), prompt], step_tokens=64) == [0, 0]


def test_guesses_leave_a_token_of_the_step_to_all_who_run():
    engine = make_engine(speculate="lookup", step_tokens=16)
    schedule, guessed = engine.scheduler.schedule, []

    def watched():
        ready = [each for each in engine.scheduler.running if not each.waits_to_be_read]
        plan = schedule()
        assert {part.sequence for part in plan.parts} >= set(ready)
        guessed.extend(part.room for part in plan.parts)
        return plan

    engine.scheduler.schedule = watched
    requests = [greedy(f"r{n}", [n + 1] * 4, 12) for n in range(6)]
    found = serve(engine, requests, check_pages)
    assert max(guessed) == 7
    assert found == {request.id: [alone(request.prompt, 12)] for request in requests}


def test_nothing_is_held_back_for_guesses_that_nobody_can_make():
    """Where as many run as a step with guesses has tokens, prompts get what is left of the step."""
    engine = make_engine(speculate="lookup", step_tokens=16, max_sequences=4)
    engine.scheduler.drafting_tokens = 3
    schedule, seen = engine.scheduler.schedule, []

    def watched():
        running = len(engine.scheduler.running)
        plan = schedule()
        seen.extend((running < 3, part.room) for part in plan.parts if part.sequence.index > 0)
        return plan

    engine.scheduler.schedule = watched
    requests = [greedy(f"r{n}", [n + 1] * 4, 6 + 4 * n) for n in range(4)]
    found = serve(engine, requests, check_pages)
    assert {may for may, room in seen if room} == {True}
    assert {False, True} == {may for may, _ in seen}
    assert found == {request.id: [alone(request.prompt, 6 + 4 * n)] for n, request in enumerate(requests)}


class Echo:
    """Guesses what the text without speculation has, but nothing right from some places on, and notes how many it may
    guess."""

    usual, most = 3, 15

    def __init__(self, text, wrong_at=()):
        self.text, self.wrong_at, self.rooms = text, wrong_at, []

    def fill(self, parts):
        for part in parts:
            if part.room:
                self.rooms.append(part.room)
                following = self.text[part.index : part.index + part.room]
                lost = min((place - part.index for place in self.wrong_at if place >= part.index), default=part.room)
                part.drafts = following[:lost] + [1 if token > 1 else 2 for token in following[lost:]]


@pytest.mark.parametrize(
    ("draft_tokens", "wrong_at", "rooms"),
    [(None, (), [3, 7, 15, 14]), (None, (9,), [3, 7, 3, 7, 15]), (4, (), [4] * 8)],
)
def test_more_is_guessed_as_long_as_all_is_right(draft_tokens, wrong_at, rooms):
    text = alone(COPIED[:8], 44)
    engine = make_engine(speculate="lookup", draft_tokens=draft_tokens, step_tokens=64)
    engine.drafter = Echo(text, wrong_at)
    if draft_tokens is None:
        engine.usual_guesses, engine.most_guesses = Echo.usual, Echo.most
    assert serve(engine, [greedy("r", COPIED[:8], 44)], check_pages)["r"] == [text]
    assert engine.drafter.rooms[: len(rooms)] == rooms
    check_empty(engine)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("wrong_at", range(11, 17))
def test_pages_of_guesses_that_were_wrong_are_given_back(wrong_at, graphs):
    """`make_engine` looks in every step whether a sequence has more pages than its tokens and guesses take, and whether its
    table names them: in graphs the host says where tokens are kept, and the table where they are read."""
    text = alone(COPIED[:8], 44)
    engine = make_engine(speculate="lookup", step_tokens=64, graphs=graphs)
    engine.drafter, engine.usual_guesses, engine.most_guesses = Echo(text, (wrong_at,)), Echo.usual, Echo.most
    assert serve(engine, [greedy("r", COPIED[:8], 44)], check_pages)["r"] == [text]
    check_empty(engine)


def test_models_that_do_not_share_a_vocabulary_are_refused():
    with pytest.raises(ValueError, match="share a tokenizer"):
        make_engine(speculate="model", draft=tiny.ours("smollm2", vocab_size=50).double())
    with pytest.raises(ValueError, match="reads 63 tokens and a text may have 64"):
        make_engine(speculate="model", draft=tiny.ours("smollm2", max_position_embeddings=63).double())
    make_engine(speculate="model", draft=tiny.ours("smollm2", max_position_embeddings=64).double())


@pytest.mark.parametrize("page", [1, 4, 32])
def test_drafts_up_to_the_last_token_that_fits(page):
    asked = dict(speculate="model", draft=decoder(), draft_tokens=9, step_tokens=64)
    engine = make_engine(page=page, pages=256 // page, **asked)
    ends = [greedy(f"r{n}", [n + 1] * (3 * n + 2), 100) for n in range(4)]  # each with other room left at the end
    found = serve(engine, ends, check_pages)
    for request in ends:
        assert found[request.id] == [alone(request.prompt, 64 - len(request.prompt))]
    check_empty(engine)


def test_nobody_gives_way_to_guesses():
    requests = lambda: [greedy(f"r{n}", COPIED[n : n + 8], 16 + 20 * n) for n in range(2)]
    plain, fast = make_engine(pages=12), make_engine(pages=12, speculate="lookup", draft_tokens=8)
    assert serve(fast, requests(), check_pages) == serve(plain, requests())
    assert fast.stats().drafted
    assert not plain.stats().preemptions
    assert not fast.stats().preemptions


def test_a_model_that_drafts_has_its_pages_within_the_memory():
    memory = 100_000
    engine = make_engine(speculate="model", draft=decoder(), kv_memory=memory)
    caches = engine.runner.cache, engine.runner.draft[1]
    of_a_page = [cache.keys[:, 0].nbytes + cache.values[:, 0].nbytes for cache in caches]
    assert memory - sum(of_a_page) < sum(of_a_page) * engine.pool.pages <= memory


@pytest.mark.parametrize("breaks", ["fill", "launch"])
def test_a_step_that_breaks_loses_nobody_who_gave_way_in_it(breaks, monkeypatch):
    engine = make_engine(pages=12, swap_memory=1 << 20, speculate="lookup", overlap=False)
    requests = [greedy(f"r{n}", COPIED[:9], 20) for n in range(3)]
    for request in requests:
        engine.add(request)
    whose = engine.drafter if breaks == "fill" else engine.runner
    real, news = getattr(whose, breaks), []

    def broken(parts):
        if engine.stats().preemptions == 1:
            raise RuntimeError("broken once")
        return real(parts)

    monkeypatch.setattr(whose, breaks, broken)
    while not engine.stats().preemptions:
        news += engine.step()
    monkeypatch.undo()
    while engine.busy:
        news += engine.step()
        check_pages(engine)
    ends = {request.id: delta for request, delta in news if delta.finish}
    assert len(ends) == 3
    assert all(delta.finish == "length" or "broken once" in delta.error for delta in ends.values())
    assert engine.scheduler.swap_tokens == (1 << 20) // bytes_of_token(torch.float64, decoder())
    check_empty(engine)
    assert serve(engine, [greedy("next", [3, 5], 5)])["next"] == [alone([3, 5], 5)]


def test_what_a_draft_model_read_is_copied_to_host_memory_too():
    engine = make_engine(max_sequences=1, swap_memory=1 << 20, speculate="model", draft=decoder(), overlap=False)
    late = greedy("late", COPIED, 30)
    late.priority = 1
    engine.add(late)
    for _ in range(4):
        engine.step()
    serve(engine, [greedy("urgent", [9] * 40, 3)])
    stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.accepted == stats.drafted > 20


def test_a_first_token_does_not_wait_for_guesses():
    """Where a chunk leaves one token of the prompt, the next step looks like one of decoding."""
    engine = make_engine(speculate="lookup", step_tokens=len(COPIED) - 1)
    request = greedy("r", COPIED, 2)  # after whose first token there is room for one more, and for no guess
    assert serve(engine, [request])["r"] == [alone(COPIED, 2)]
    assert engine.stats().drafted == 0


def test_a_draft_with_which_the_text_ends_was_accepted():
    texts = {first: alone([first, 5], 3) for first in range(1, 20)}
    prompt, whole = next(([first, 5], text) for first, text in texts.items() if text[2] not in text[:2])
    engine = make_engine(speculate="model", draft=decoder(), draft_tokens=4)
    asked = greedy("r", prompt, 21, stop_ids=(whole[2],))
    assert serve(engine, [asked])["r"] == [whole]
    assert engine.stats().accepted == 2  # the first token came with the prompt, and two drafts after it


def test_a_number_of_guesses_without_who_guesses_is_refused():
    with pytest.raises(ValueError, match="set speculate, too, to lookup or a model"):
        make_engine(draft_tokens=3)
