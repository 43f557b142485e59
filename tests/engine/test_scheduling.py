"""Requests of any kind, in any order, in a pool that is too small: each gets what it would get alone, and no page is lost."""

import random

import pytest
import tiny_models as tiny
import torch
from engines import alone, check_empty, check_pages, decoder, greedy, make_engine, serve, vector_alone
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestack import ops
from tilestack.engine import Request, RequestError, SamplingParams
from tilestack.engine.pages import PagePool
from tilestack.engine.settings import bytes_of_token

PROMPTS = [
    [3, 5, 7, 11, 13, 17, 19, 23, 29],
    [3, 5, 7, 11, 13, 17, 19, 23, 31, 37],
    [4],
    [3, 5, 7, 11],
    list(range(20, 44)),
]


def requests(count=5, **params):
    return [greedy(f"r{n}", PROMPTS[n % len(PROMPTS)], 6 + n, **params) for n in range(count)]


@pytest.mark.parametrize("family", ["smollm2", "mistral", "qwen3_moe", "deepseek_v2", "gemma3"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_served_together_they_answer_as_alone(family, overlap, graphs):
    engine = make_engine(family=family, overlap=overlap, graphs=graphs)
    found = serve(engine, requests(), check_pages)
    for request in requests():
        assert found[request.id] == [alone(request.prompt, request.params.max_tokens, family)]
    check_empty(engine)


@pytest.mark.parametrize(("overlap", "first", "steps"), [(None, 1, 4), (False, 1, 4), (True, 0, 5)])
def test_on_a_cpu_a_token_is_told_by_the_step_that_computes_it_unless_asked_otherwise(overlap, first, steps):
    engine = make_engine(overlap=overlap)
    engine.add(greedy("a", PROMPTS[0], 4))
    assert len(engine.step()) == first
    calls = 1
    while engine.busy:
        engine.step()
        calls += 1
    assert calls == steps


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_too_few_pages_for_all_of_them(swap):
    engine = make_engine(pages=14, swap_memory=swap)
    found = serve(engine, requests(8), check_pages)
    assert engine.stats().preemptions > 0
    for request in requests(8):
        assert found[request.id] == [alone(request.prompt, request.params.max_tokens)]
    check_empty(engine)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["smollm2", "deepseek_v2"])
def test_keys_and_values_in_eight_bits(kept, family):
    expected = serve(make_engine(family=family, kv_dtype=kept), requests(8))
    engine = make_engine(family=family, kv_dtype=kept, pages=14, swap_memory=1 << 20)
    assert serve(engine, requests(8), check_pages) == expected  # a token's codes depend on the token alone
    assert engine.stats().preemptions
    with pytest.raises(ValueError, match="no kv_dtype 'int3'"):
        make_engine(kv_dtype="int3")


def test_caches_of_codes_know_what_their_keys_have_in_common():
    engine = make_engine(kv_dtype="int8", speculate="model", draft=tiny.ours("qwen2").double())
    caches = engine.runner.cache, engine.runner.draft[1]
    assert all(cache.key_offset.abs().amax((1, 2)).all() for cache in caches)
    assert make_engine().runner.cache.key_offset is None


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_prompts_as_codes(kept, monkeypatch):
    """Chunks of prompts multiply codes, decoding does not, and the same request has the same answer again."""
    asked, called = requests(6), []
    coded = ops.paged_attention_codes
    monkeypatch.setitem(
        vars(ops), coded.name, lambda *given, **named: called.append(given[6]) or coded(*given, **named)
    )
    engine = make_engine(kv_dtype=kept, code_queries=True, step_tokens=64, prefix_caching=False)
    long = Request("long", list(range(3, 43)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    found = serve(engine, [*asked, long])
    assert called
    assert min(called) >= 16
    assert serve(engine, [long])["long"] == found["long"]
    with pytest.raises(ValueError, match="which a cache with kv_dtype int8 or fp8 has"):
        make_engine(code_queries=True)


@pytest.mark.parametrize("kept", [None, "int8", "fp8"])
@pytest.mark.parametrize("family", ["smollm2", "deepseek_v2"])
def test_a_token_takes_the_memory_that_is_reckoned_with(kept, family):
    engine = make_engine(family=family, kv_dtype=kept)
    cache = engine.runner.cache
    page = sum(tensor[:, 0].nbytes for tensor in cache.tensors())
    assert page == bytes_of_token(cache.keys.dtype, engine.decoder) * engine.pool.page


class Traffic:
    """Arrivals, cancellations and steps as hypothesis draws them."""

    def __init__(self, **settings):
        self.engine = make_engine(**settings)
        self.found, self.told, self.asked, self.cancelled, self.vectors = {}, {}, {}, set(), {}

    def run(self, events):
        for kind, number in events:
            if kind == "arrive":
                self.arrive(number)
            elif kind == "cancel" and self.asked:
                id = sorted(self.asked)[number % len(self.asked)]
                if id in self.engine.requests:
                    self.cancelled.add(id)
                self.note(self.engine.cancel(id))
                assert id not in self.engine.requests
            else:
                self.note(self.engine.step())
            check_pages(self.engine)
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.note(self.engine.step())
            check_pages(self.engine)

    def arrive(self, number):
        draw = random.Random(number)
        prompt = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31][: draw.randint(1, 10)] + [
            draw.randint(0, 96) for _ in range(draw.randint(0, 9))
        ]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.0, 1.0]), seed=number, max_tokens=draw.randint(1, 12), ignore_eos=draw.random() < 0.7,
            n=draw.choice([1, 1, 2]), top_k=draw.choice([0, 20]), repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            logprobs=draw.choice([None, None, 2]), **draw.choice([{}, {}, dict(stop_ids=(40,), min_tokens=1, logit_bias={40: 9.0})]),
        )  # fmt: skip
        request = Request(
            f"r{len(self.asked)}", prompt, params, priority=draw.choice([0, 0, 1]), salt=draw.choice(["", "x"])
        )
        if pooling := draw.choice([None, None, "mean", "last"]):
            request.params, request.pooling, params = SamplingParams(), pooling, SamplingParams()
        self.asked[request.id] = request
        self.found[request.id] = [[] for _ in range(params.n)]
        self.told[request.id] = [[] for _ in range(params.n)]
        self.engine.add(request)

    def note(self, news):
        for request, delta in news:
            assert delta.error is None
            self.found[request.id][delta.choice] += delta.ids
            self.told[request.id][delta.choice] += delta.logprobs
            if delta.vector:
                assert delta.finish == "stop"
                self.vectors[request.id] = delta.vector

    def check_totals(self):
        """What is counted is what was asked for and what was given."""
        stats = self.engine.stats()
        assert stats.requests == len(self.asked)
        assert stats.prompt_tokens == sum(len(request.prompt) for request in self.asked.values())
        assert stats.cached_tokens == sum(request.cached for request in self.asked.values())
        assert stats.completion_tokens == sum(len(ids) for each in self.found.values() for ids in each)
        assert stats.accepted <= stats.drafted

    def check_told(self):
        """A log-probability for each token where they were asked for, the model's own, and none elsewhere."""
        for id, request in self.asked.items():
            for ids, told in zip(self.found[id], self.told[id], strict=True):
                assert [each.id for each in told] == (ids if request.params.logprobs is not None else [])
                if told:
                    with torch.no_grad():
                        logits = decoder()(torch.tensor([[*request.prompt, *ids]]))[0, len(request.prompt) - 1 : -1]
                    own = torch.log_softmax(logits, -1)[range(len(ids)), ids]
                    assert [each.logprob for each in told] == pytest.approx(own.tolist(), abs=1e-5)

    def check_vectors(self):
        """One for each who asked for it and stayed, and that of one forward."""
        asked = {id for id, request in self.asked.items() if request.pooling}
        assert asked - self.cancelled == self.vectors.keys()
        for id, vector in self.vectors.items():
            expected = vector_alone(self.asked[id].prompt, self.asked[id].pooling)
            torch.testing.assert_close(torch.tensor(vector), torch.tensor(expected), rtol=1e-5, atol=1e-7)
            assert self.found[id] == [[]]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "step", "step", "step", "cancel"]), st.integers(0, 40)), max_size=40
)


@settings(max_examples=25, deadline=None)
@given(events=EVENTS, pages=st.integers(8, 20), overlap=st.booleans(), swap=st.sampled_from([0, 4000, 1 << 20]), tokens=st.integers(3, 20), lookup=st.booleans(), graphs=st.booleans())  # fmt: skip
def test_any_traffic_in_a_small_pool(events, pages, overlap, swap, tokens, lookup, graphs):
    traffic = Traffic(
        pages=pages, overlap=overlap, swap_memory=swap, step_tokens=tokens, max_sequences=3, graphs=graphs,
        speculate="lookup" if lookup else None,
    )  # fmt: skip
    traffic.run(events)
    check_empty(traffic.engine)
    traffic.check_totals()
    traffic.check_told()
    traffic.check_vectors()
    for id, request in traffic.asked.items():
        if request.pooling:
            continue
        alone = Request(id, request.prompt, request.params)
        expected = serve(make_engine(overlap=False, prefix_caching=False, step_tokens=64), [alone])[id]
        if id in traffic.cancelled:
            assert all(whole[: len(part)] == part for part, whole in zip(traffic.found[id], expected, strict=True)), id
        else:
            assert traffic.found[id] == expected, id


def test_a_prefix_is_computed_once_and_only_shared_within_a_salt():
    engine = make_engine()
    prompt = list(range(1, 22))
    serve(engine, [greedy("first", prompt, 4)])
    again, other = greedy("again", prompt, 4), Request("other", prompt, SamplingParams(max_tokens=4), salt="tenant")
    serve(engine, [again, other], check_pages)
    assert again.cached == 20
    assert other.cached == 0
    check_empty(engine)


def test_what_a_request_computed_itself_was_not_cached():
    engine = make_engine(max_sequences=1, step_tokens=8)
    late = greedy("late", list(range(1, 22)), 3)
    late.priority = 1
    engine.add(late)
    engine.step()
    serve(engine, [greedy("urgent", [7, 8], 3)])
    assert engine.stats().preemptions == 1
    assert late.cached == 0


def test_equal_hashes_are_not_enough_to_share(monkeypatch):
    from tilestack.engine import pages

    monkeypatch.setattr(pages, "page_key", lambda before, ids: b"same")
    engine = make_engine()
    serve(engine, [greedy("first", list(range(1, 10)), 2)])
    second = greedy("second", list(range(40, 49)), 2)
    found = serve(engine, [second])
    assert second.cached == 0
    assert found["second"] == [alone(second.prompt, 2)]


def test_of_equal_hashes_and_tokens_what_stands_before_decides(monkeypatch):
    """So that a collision does not show a tenant what another computed."""
    from tilestack.engine import pages

    monkeypatch.setattr(pages, "page_key", lambda before, ids: bytes(ids))
    engine, prompt = make_engine(), list(range(1, 10))
    serve(engine, [greedy("first", prompt, 2)])
    tenant, again = greedy("tenant", prompt, 2), greedy("again", prompt, 2)
    tenant.salt = "tenant"
    serve(engine, [tenant, again])
    assert (tenant.cached, again.cached) == (0, 8)


@pytest.mark.parametrize("begun", [0, 4])
def test_the_urgent_come_first_and_those_who_run_give_way(begun):
    engine, order, found = make_engine(max_sequences=1), [], []
    late, urgent = greedy("late", [5, 6], 9), greedy("urgent", [7, 8], 3)
    late.priority = 1
    engine.add(late)
    news = [each for _ in range(begun) for each in engine.step()]
    engine.add(urgent)
    while engine.busy:
        news += engine.step()
    for request, delta in news:
        order += [request.id] if delta.finish else []
        found += delta.ids if request is late else ()
    assert order == ["urgent", "late"]
    assert found == alone([5, 6], 9)
    check_empty(engine)


def test_among_equals_nobody_gives_way_and_the_first_ends_first():
    engine, order = make_engine(max_sequences=2), []
    for n in range(5):
        engine.add(greedy(f"r{n}", [n + 1] * 5, 6))
    while engine.busy:
        order += [request.id for request, delta in engine.step() if delta.finish]
    assert order == sorted(order)
    assert engine.stats().preemptions == 0


def test_who_gave_way_with_a_token_in_flight_goes_on_with_that_token():
    """The urgent one shares its beginning with who runs, so there is room again for who gave way, in the same step."""
    engine, found = make_engine(pages=10, max_sequences=3), {"a": [], "b": [], "urgent": []}
    first, late, urgent = (
        greedy("b", list(range(1, 18)), 6),
        greedy("a", [5, 6, 7], 9),
        greedy("urgent", list(range(1, 18)), 3),
    )
    late.priority = 1

    def step():
        for request, delta in engine.step():
            found[request.id] += delta.ids

    engine.add(first)
    engine.add(late)
    for _ in range(4):
        step()
    engine.add(urgent)
    while engine.busy:
        step()
        check_pages(engine)
    assert engine.stats().preemptions > 0
    assert found == {each.id: alone(each.prompt, each.params.max_tokens) for each in (first, late, urgent)}


def test_of_what_is_free_the_least_recently_used_is_forgotten_first():
    pool = PagePool(7, 2)
    first, second = [pool.take() for _ in range(3)], [pool.take() for _ in range(2)]
    for pages, start in ((first, 0), (second, 50)):
        key = b""
        for place, page in enumerate(pages):
            key = pool.remember(page, key, [start + place, 1])
    texts = [[0, 1, 1, 1, 2, 1], [50, 1, 51, 1]]
    pool.release(first)
    pool.release(second)
    assert [pool.find(b"", text)[0] for text in texts] == [first, second]
    pool.take()  # the page that was never used
    pool.take()
    assert [pool.find(b"", text)[0] for text in texts] == [first[:2], second]  # a text loses its last page first
    for page in pool.find(b"", texts[0])[0]:
        pool.share(page)
    pool.release(first[:2])  # used again, so now the second text is the older
    pool.take()
    assert [pool.find(b"", text)[0] for text in texts] == [first[:2], second[:1]]
    with pytest.raises(AssertionError, match="released by nobody"):
        pool.release(first[:1])


def test_who_is_cancelled_in_host_memory_leaves_nothing_there():
    engine = make_engine(max_sequences=1, swap_memory=1 << 20)
    late = greedy("late", [5, 6], 9)
    late.priority = 1
    engine.add(late)
    engine.step()
    engine.add(greedy("urgent", [7, 8], 9))
    engine.step()
    assert engine.runner.swapped
    engine.cancel("late")
    assert not engine.runner.swapped
    check_pages(engine)
    serve(engine, [])
    check_empty(engine)


@pytest.mark.parametrize("kind", [dict(page=1, pages=64), dict(page=256, pages=8), dict(step_tokens=1), dict(max_sequences=1), dict(speculate="lookup", draft_tokens=30, step_tokens=3), dict(page=16, pages=4, context=13), dict(page=64, pages=1), dict(page=32, pages=2, swap_memory=1 << 20, family="deepseek_v2")])  # fmt: skip
def test_odd_settings(kind):
    engine = make_engine(**kind)
    asked = [greedy(f"r{n}", PROMPTS[n % 4], 3) for n in range(6)]
    found = serve(engine, asked, check_pages)
    family = kind.get("family", "smollm2")
    assert found == {each.id: [alone(each.prompt, 3, family)] for each in asked}
    check_empty(engine)


def test_a_context_is_the_one_that_was_asked_for_or_none(caplog):
    """By itself it is as long as the memory allows, and that is said."""
    with pytest.raises(ValueError, match="a context of 65 tokens, and the model reads 64; give 64 or less"):
        make_engine(context=65)
    with pytest.raises(
        ValueError, match=r"hold 40 tokens; a context of 48 takes .* MB. Give a context of 40 or less, or more kv"
    ):
        make_engine(pages=10, context=48)
    assert make_engine(pages=10, context=40).context == 40
    assert not caplog.messages
    assert make_engine(pages=10).context == 40
    assert "Texts end at 40 tokens" in caplog.text


def test_more_answers_than_can_ever_wait_and_run_are_refused_for_good():
    engine = make_engine(max_sequences=2, queue=2)
    request = lambda drawn: Request("r", [1, 2], SamplingParams(n=1, best_of=drawn, max_tokens=2))
    with pytest.raises(RequestError, match="5 sequences, and at most 2 run at a time while 2 wait; ask for 4 or fewer"):
        engine.add(request(5))
    serve(engine, [request(4)])
    check_empty(engine)


@pytest.mark.parametrize("family", ["deepseek_v2", "gemma3"])
def test_swapping_of_latents_and_windows(family):
    engine = make_engine(pages=14, swap_memory=1 << 20, family=family)
    found = serve(engine, requests(8), check_pages)
    assert engine.stats().preemptions > 0
    assert found == {each.id: [alone(each.prompt, each.params.max_tokens, family)] for each in requests(8)}
    check_empty(engine)


def test_a_prompt_is_not_looked_up_while_there_is_no_row_for_it(monkeypatch):
    engine, looked = make_engine(max_sequences=1), 0
    find = engine.pool.find

    def counted(*given):
        nonlocal looked
        looked += 1
        return find(*given)

    monkeypatch.setattr(engine.pool, "find", counted)
    serve(engine, [greedy("first", list(range(1, 22)), 9), greedy("second", list(range(1, 22)), 9)])
    assert looked == 2


def test_a_hundredth_of_the_pages_is_left_to_those_who_run():
    engine = make_engine(pages=201)
    engine.add(greedy("runs", [5, 6], 9))
    engine.step()
    taken = [engine.pool.take() for _ in range(len(engine.pool.free) - 3)]
    engine.add(greedy("waits", [7] * 9, 2))  # for which three pages are enough
    engine.step()
    assert [each.request.id for each in engine.scheduler.running] == ["runs"]
    engine.pool.release(taken)
    serve(engine, [])
    check_empty(engine)


def test_the_urgent_take_nothing_from_those_who_run_where_there_is_room_for_all():
    engine = make_engine()
    late = greedy("late", [5, 6], 9)
    late.priority = 1
    engine.add(late)
    engine.step()
    found = serve(engine, [greedy("urgent", [7, 8], 3)], check_pages)
    assert engine.stats().preemptions == 0
    assert found["urgent"] == [alone([7, 8], 3)]


def test_pages_that_hold_the_same_behind_other_beginnings_are_found_for_each():
    engine, same = make_engine(), [9, 10, 11, 12]
    prompts = [[1, 2, 3, 4, *same, 50], [5, 6, 7, 8, *same, 51]]
    serve(engine, [greedy(f"first{n}", prompt, 2) for n, prompt in enumerate(prompts)])
    again = [greedy(f"again{n}", prompt, 2) for n, prompt in enumerate(prompts)]
    found = serve(engine, again, check_pages)
    assert [request.cached for request in again] == [8, 8]
    assert found == {request.id: [alone(request.prompt, 2)] for request in again}


def test_a_long_prompt_leaves_its_tokens_of_a_step_to_the_urgent():
    engine, order = make_engine(step_tokens=5), []
    late = greedy("late", list(range(1, 44)), 2)
    late.priority = 1
    engine.add(late)
    engine.step()
    for id in ("one", "two"):
        engine.add(greedy(id, [7, 8, 9], 3))
    while engine.busy:
        order += [request.id for request, _ in engine.step()]
        check_pages(engine)
    assert (sorted(order[:6]), order[6:]) == (["one"] * 3 + ["two"] * 3, ["late"] * 2)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_who_gives_way_with_pages_to_spare_comes_back_a_step_later(swap):
    """Drafts leave such pages. Its own would be enough for it to return at once, and to give way again."""
    engine = make_engine(pages=7, overlap=False, swap_memory=swap)
    first, late = greedy("first", [3, 5, 7], 12), greedy("late", [4, 6, 8], 9)
    found = {"first": [], "late": []}

    def step():
        for request, delta in engine.step():
            found[request.id] += delta.ids
        check_pages(engine)

    for request in (first, late):
        engine.add(request)
    step()
    (spares,), (needs,) = late.sequences, first.sequences
    while needs.kept % 4:  # until its page is full
        step()
    spares.pages += [engine.pool.take() for _ in range(len(engine.pool.free))]
    step()
    assert engine.stats().preemptions == 1
    assert spares in engine.scheduler.waiting
    step()
    assert spares in engine.scheduler.running
    while engine.busy:
        step()
    assert found == {each.id: alone(each.prompt, each.params.max_tokens) for each in (first, late)}
    check_empty(engine)
