"""What a request asks for is what happens to its tokens: against plain decoding with the same rules written out."""

import itertools
import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from engines import alone, check_empty, decoder, make_engine, serve

from tilestack import ops
from tilestack.engine import Completion, Request, RequestError, SamplingParams, TokenLogprob, runner
from tilestack.engine.engine import how_good
from tilestack.engine.sampling import Draws, SamplingRows, sample_unfiltered
from tilestack.engine.sequence import first_seeds
from tilestack.engine.text import TextStream

PROMPT = [3, 5, 7, 11, 13, 5, 5]


def ask(engine=None, prompt=PROMPT, **params):
    engine = engine or make_engine()
    request = Request(
        "r", list(prompt), SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params))
    )
    engine.add(request)
    news = []
    while engine.busy:
        news += engine.step()
    check_empty(engine)
    return request, [delta for _, delta in news]


def tokens_of(deltas, choice=0):
    return [token for delta in deltas if delta.choice == choice for token in delta.ids]


def by_hand(rule, count=12):
    """Greedy decoding where `rule(logits, ids)` changes the logits [V] of the next token."""
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(rule(decoder()(torch.tensor([ids]))[0, -1], ids).argmax()))
    return ids[len(PROMPT) :]


def penalties(repetition=1.0, presence=0.0, frequency=0.0):
    def rule(logits, ids):
        logits = logits.clone()
        for token in set(ids):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(ids[len(PROMPT) :]):
            logits[token] -= presence + frequency * ids[len(PROMPT) :].count(token)
        return logits

    return rule


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("asked", [dict(repetition=1.7), dict(presence=1.1), dict(frequency=0.8), dict(repetition=0.6, presence=-0.5, frequency=0.4)])  # fmt: skip
def test_penalties(asked, overlap):
    _, deltas = ask(make_engine(overlap=overlap), **{f"{name}_penalty": value for name, value in asked.items()})
    assert tokens_of(deltas) == by_hand(penalties(**asked))
    assert tokens_of(deltas) != alone(PROMPT, 12)


def test_penalties_of_one_leave_the_others_alone():
    engine = make_engine()
    plain = [
        Request(f"p{n}", [n + 1, 5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)) for n in range(3)
    ]
    penal = Request("x", PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, frequency_penalty=2))
    found = serve(engine, [plain[0], penal, *plain[1:]])
    found |= {"late": serve(engine, [Request("late", [2, 5], plain[0].params)])["late"]}  # in a row that was penalised
    assert found["x"] == [by_hand(penalties(frequency=2), 9)]
    assert [found[each.id] for each in plain] == [[alone(each.prompt, 9)] for each in plain]
    assert found["late"] == [alone([2, 5], 9)]


def test_a_penalty_lowers_what_was_seen_whatever_its_sign_and_nothing_of_who_had_the_row_before():
    rows = SamplingRows(1, 6, torch.device("cpu"))
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.5, -0.5]])
    for seen in ([0, 1], [2, 3]):
        params = SamplingParams(repetition_penalty=2.0)
        rows.enter([SimpleNamespace(params=params, row=0, ids=seen, prompt=len(seen))])
        expected = logits.clone()
        for token in seen:
            expected[0, token] = min(logits[0, token] * 2, logits[0, token] / 2)
        assert torch.equal(rows.penalised(logits, torch.tensor([0])), expected)


def test_what_was_drawn_before_in_a_row_counts_for_nobody_else():
    engine = make_engine(max_sequences=1)
    asked = dict(frequency_penalty=0.8, presence_penalty=0.5)
    first, again = (tokens_of(ask(engine, **asked)[1]) for _ in range(2))
    assert first == again == by_hand(penalties(frequency=0.8, presence=0.5))


def test_log_probabilities_without_those_of_other_tokens():
    _, deltas = ask(logprobs=0)
    told = [each for delta in deltas for each in delta.logprobs]
    assert [each.id for each in told] == alone(PROMPT, 12)
    assert all(each.logprob < 0 and not each.top for each in told)


def test_biases_and_bans():
    favourite = {40: 100.0, 41: -100.0}
    assert tokens_of(ask(logit_bias=favourite)[1]) == [40] * 12
    assert tokens_of(ask(logit_bias={40: 100, 41: -100})[1]) == [40] * 12  # as whole numbers, which clients send
    small = torch.arange(90) % 7 / 100
    assert tokens_of(ask(logit_bias=dict(enumerate(small.tolist())))[1]) == by_hand(
        lambda logits, ids: torch.cat([logits[:90] + small, logits[90:]])
    )
    first = alone(PROMPT, 1)[0]
    banned = {first: -1000.0}
    assert tokens_of(ask(logit_bias=banned)[1]) == by_hand(
        lambda logits, ids: logits.index_fill(0, torch.tensor([first]), -math.inf)
    )


def test_who_asks_for_the_likeliest_alone_gets_them_whoever_is_beside():
    drawn = lambda name, **params: Request(name, PROMPT, SamplingParams(temperature=2.0, seed=7, max_tokens=12, ignore_eos=True, **params))  # fmt: skip
    asked = [drawn("all"), drawn("few", top_k=2), drawn("likely", top_p=0.3), drawn("rest", min_p=0.5)]
    alone_each = {request.id: serve(make_engine(), [request])[request.id] for request in asked}
    assert serve(make_engine(), asked) == alone_each
    assert len({str(found) for found in alone_each.values()}) == 4


def test_every_answer_follows_its_own_grammar():
    """Of several in a batch, one in between follows none."""

    class Only:
        def __init__(self, *tokens):
            self.tokens = list(tokens)

        def allowed(self):
            return numpy.isin(numpy.arange(6), self.tokens)

    matchers = [Only(1, 3), None, Only(5)]
    sequences = [SimpleNamespace(params=SamplingParams(), matcher=matcher, stops=()) for matcher in matchers]
    rows = SamplingRows(3, 6, torch.device("cpu"))
    logits = torch.arange(18.0).view(3, 6)
    found = rows.adjusted(logits, Draws(sequences, [0, 0, 0]), torch.arange(3))
    kept = torch.tensor([[0, 1, 0, 1, 0, 0], [1] * 6, [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(found, torch.where(kept, logits, -torch.inf))


def test_settings_of_rows_are_those_of_who_runs_there():
    """One table holds integers and the bits of floats: each comes out as it went in, and rows of others stay."""
    asked = [
        SamplingParams(temperature=0.7, top_k=50_000, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
        SamplingParams(temperature=0, top_k=0, presence_penalty=-2, frequency_penalty=0.25),
        SamplingParams(temperature=1e-5, top_k=1),
    ]
    rows = SamplingRows(4, 6, torch.device("cpu"))
    enter = lambda params, row: SimpleNamespace(params=params, row=row, ids=[1], prompt=1)
    rows.enter([enter(asked[0], 3), enter(asked[1], 0)])
    rows.enter([])
    rows.enter([enter(asked[2], 1)])
    float32 = lambda name, chosen: torch.tensor([getattr(each, name) for each in chosen], dtype=torch.float32)
    chosen = [asked[2], asked[0], asked[0], asked[1]]
    temperature, top_k, top_p, min_p = rows.of_rows(torch.tensor([1, 3, 3, 0]))
    assert torch.equal(temperature, float32("temperature", chosen))
    assert torch.equal(top_p, float32("top_p", chosen))
    assert torch.equal(min_p, float32("min_p", chosen))
    assert top_k.tolist() == [1, 50_000, 50_000, 0]
    assert rows.repetition[[3, 0]].tolist() == float32("repetition_penalty", asked[:2]).tolist()
    assert (float(rows.presence[0]), float(rows.frequency[0])) == (-2.0, 0.25)
    assert not rows.table[:, [2, 4]].any()


def test_no_stop_before_the_least_number_of_tokens():
    whole = alone(PROMPT, 12)
    stop = whole[3]
    ended = whole.index(stop) + 1
    _, deltas = ask(stop_ids=(stop,))
    assert tokens_of(deltas) == whole[:ended]
    assert (deltas[-1].finish, deltas[-1].stopped_by) == ("stop", stop)
    _, deltas = ask(stop_ids=(stop,), min_tokens=8)
    found = tokens_of(deltas)
    assert stop not in found[:8]
    assert len(found) >= 8


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("bias", [0.0, 100.0])
@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_stop_comes_from_the_least_number_of_tokens_on(least, bias, graphs):
    """Of those before there is none, however large its bias, and with a large one it is the next."""
    stop = alone(PROMPT, 1)[0]

    def rule(logits, ids):
        change = bias if len(ids) - len(PROMPT) >= least else -math.inf
        return logits.index_add(0, torch.tensor([stop]), torch.tensor([change], dtype=logits.dtype))

    asked = dict(logit_bias={stop: bias}) if bias else {}
    _, deltas = ask(make_engine(graphs=graphs), stop_ids=(stop,), min_tokens=least, **asked)
    expected = by_hand(rule)
    ends = expected.index(stop) + 1 if stop in expected else len(expected)
    assert tokens_of(deltas) == expected[:ends]
    assert ends == least + 1 or not bias


class EveryTokenIs(TextStream):
    """A text to which every token adds the same."""

    def __init__(self, piece, stop):
        super().__init__(None, [stop])
        self.pieces = SimpleNamespace(step=lambda token: piece, left=str)


@pytest.mark.parametrize("least", [0, 1, 2, 5])
def test_a_stop_text_may_end_an_answer_with_the_least_number_of_tokens(least):
    engine = make_engine()
    request = Request("r", PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, min_tokens=least))
    engine.add(request)
    request.sequences[0].text = EveryTokenIs("a", "a")
    serve(engine, [])
    assert len(request.sequences[0].ids) - len(PROMPT) == max(1, least)
    assert request.sequences[0].text.stopped_by == "a"


@pytest.mark.parametrize("ended_by", [dict(max_tokens=5), dict(stop_ids=(40,), logit_bias={40: 100.0}, min_tokens=5)])
def test_what_may_have_been_a_stop_is_shown_when_the_answer_ends_with_something_else(ended_by):
    engine, text = make_engine(), ""
    request = Request("r", PROMPT, SamplingParams(temperature=0, ignore_eos=True, **ended_by))
    engine.add(request)
    request.sequences[0].text = EveryTokenIs("a", "a" * 9)
    while engine.busy:
        text += "".join(delta.text for _, delta in engine.step())
    assert text == "a" * 5
    assert request.sequences[0].text.stopped_by is None


def test_ends_count_unless_they_are_ignored():
    end = decoder().config.eos[0]
    _, deltas = ask(logit_bias={end: 100.0}, ignore_eos=False)
    assert tokens_of(deltas) == [end]
    assert (deltas[-1].finish, deltas[-1].stopped_by) == ("stop", None)  # the model's own end is no stop of the request
    _, deltas = ask(logit_bias={end: 100.0})
    assert tokens_of(deltas) == [end] * 12
    assert deltas[-1].finish == "length"


def test_the_context_ends_an_answer():
    _, deltas = ask(make_engine(context=10), max_tokens=None)
    assert len(tokens_of(deltas)) == 3
    assert deltas[-1].finish == "length"


def test_logprobs_are_the_models_own():
    request, deltas = ask(logprobs=3, prompt_logprobs=2, temperature=0.7, seed=5, repetition_penalty=1.4)
    told = [each for delta in deltas for each in delta.logprobs]
    ids = PROMPT + tokens_of(deltas)
    with torch.no_grad():
        truth = torch.log_softmax(decoder()(torch.tensor([ids]))[0], -1)
    assert [each.id for each in told] == ids[len(PROMPT) :]
    for place, each in enumerate(told, len(PROMPT) - 1):
        assert each.logprob == pytest.approx(float(truth[place, each.id]), abs=1e-5)
        values, tokens = truth[place].topk(3)
        assert [token for token, _ in each.top] == tokens.tolist()
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert request.prompt_logprobs[0] is None
    assert len(request.prompt_logprobs) == len(PROMPT)
    for place, each in enumerate(request.prompt_logprobs[1:]):
        assert each.id == PROMPT[place + 1]
        assert each.logprob == pytest.approx(float(truth[place, each.id]), abs=1e-5)
        assert len(each.top) == 2


def test_prompt_logprobs_of_a_prompt_in_chunks_that_was_preempted():
    prompt = [(7 * n) % 97 for n in range(40)]
    engine = make_engine(pages=16, step_tokens=6, max_sequences=1)
    asked = Request(
        "p", prompt, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True), priority=1
    )
    engine.add(asked)
    for _ in range(3):
        engine.step()
    serve(
        engine,
        [
            Request(f"u{n}", [n + 1] * 9, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            for n in range(3)
        ],
    )
    assert engine.stats().preemptions == 1
    assert asked.sequences[0].admission > 1  # it was the one, and began again
    with torch.no_grad():
        truth = torch.log_softmax(decoder()(torch.tensor([prompt]))[0], -1)
    assert [each and each.id for each in asked.prompt_logprobs] == [None, *prompt[1:]]
    for place, each in enumerate(asked.prompt_logprobs[1:]):
        assert each.logprob == pytest.approx(float(truth[place, each.id]), abs=1e-5)


def test_prompt_logprobs_are_told_of_a_prompt_that_is_remembered():
    engine = make_engine()
    asked = [
        Request(f"{n}", PROMPT * 2, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, n=2))
        for n in range(2)
    ]
    for request in asked:
        serve(engine, [request])
    assert len(asked[0].prompt_logprobs) == len(PROMPT) * 2
    assert [each and each.id for each in asked[1].prompt_logprobs] == [
        each and each.id for each in asked[0].prompt_logprobs
    ]


@pytest.mark.parametrize("rows", [256, 2])
def test_prompt_logprobs_beside_others_in_the_step(rows, monkeypatch):
    """Whatever number of them is computed at a time."""
    monkeypatch.setattr(runner, "PROMPT_ROWS", rows)
    engine = make_engine(step_tokens=64)
    asked = [
        Request(f"{n}", PROMPT[n:], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=n)) for n in range(3)
    ]
    serve(engine, asked)
    for n, request in enumerate(asked):
        assert [each and each.id for each in request.prompt_logprobs] == [None, *PROMPT[n + 1 :]]
        with torch.no_grad():
            truth = torch.log_softmax(decoder()(torch.tensor([PROMPT[n:]]))[0], -1)
        for place, each in enumerate(request.prompt_logprobs[1:]):
            assert each.logprob == pytest.approx(float(truth[place, each.id]), abs=1e-5)
            assert [token for token, _ in each.top] == truth[place].topk(n).indices.tolist()


def test_draws_follow_the_distribution_and_the_seed_alone():
    params = dict(temperature=1.3, top_p=0.9, max_tokens=1)
    engine = make_engine(max_sequences=64, step_tokens=512, pages=256)
    requests = [Request(f"{n}", PROMPT, SamplingParams(seed=n, **params)) for n in range(600)]
    found = serve(engine, requests)
    drawn = torch.tensor([found[request.id][0][0] for request in requests]).bincount(minlength=97) / 600
    with torch.no_grad():
        truth = torch.softmax(decoder()(torch.tensor([PROMPT]))[0, -1] / 1.3, -1)
    values, order = truth.sort(descending=True)
    kept = order[(values.cumsum(0) - values) < 0.9]
    share = torch.zeros(97, dtype=truth.dtype).index_copy(0, kept, truth[kept] / truth[kept].sum())
    assert set(drawn.nonzero().flatten().tolist()) <= set(kept.tolist())
    assert float((drawn - share).abs().sum()) / 2 < 0.15  # total variation; 600 draws of this law stay below
    again = serve(make_engine(), [Request("z", PROMPT, SamplingParams(seed=17, **params))])
    assert again["z"] == found["17"]


def test_who_draws_beside_one_who_does_not_draws_all_the_same():
    drawn = Request("drawn", PROMPT, SamplingParams(temperature=2.0, seed=3, max_tokens=9, ignore_eos=True))
    plain = Request("plain", PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    found = serve(make_engine(), [drawn, plain])
    assert found["plain"] == [alone(PROMPT, 9)] != found["drawn"]
    assert found["drawn"] == serve(make_engine(), [drawn])["drawn"]


def test_every_seed_draws_a_text_of_its_own():
    seeds = [0, 1, -1, 2**62, -(2**62), 2**63, -(2**63), 2**64 - 1]
    found = [tokens_of(ask(temperature=2.0, seed=seed)[1]) for seed in seeds]
    assert len({tuple(answer) for answer in found}) == len(seeds)
    assert found == [tokens_of(ask(temperature=2.0, seed=seed)[1]) for seed in seeds]
    assert tokens_of(ask(temperature=2.0)[1]) != tokens_of(ask(temperature=2.0)[1])


def test_no_answer_draws_the_noise_of_another_a_few_tokens_later():
    """The noise of a token is that of the seed and its place, so seeds are further apart than a text is long."""
    for seed in (0, 1, 2**40, None):
        seeds = sorted(first_seeds(SamplingParams(seed=seed, n=64)))
        assert min(after - before for before, after in itertools.pairwise(seeds)) > 2**32
    assert first_seeds(SamplingParams(seed=3, n=5))[:2] == first_seeds(SamplingParams(seed=3, n=2))


def test_of_two_answers_the_one_whose_tokens_are_likelier_is_better_however_long():
    said = lambda *logprobs, finish="stop": Completion(
        logprobs=[TokenLogprob(1, each) for each in logprobs], finish=finish
    )
    short, long = said(-1.0), said(-0.6, -0.6, -0.6, -0.6, finish="length")
    cut_off = said(-0.1, finish="cancelled")
    assert sorted([cut_off, short, long], key=how_good, reverse=True) == [long, short, cut_off]


def test_several_answers_differ_and_the_best_are_chosen():
    request, deltas = ask(temperature=1.0, seed=4, n=3)
    answers = [tokens_of(deltas, choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert request.cached == 0
    _, best = ask(temperature=1.0, seed=4, n=1, best_of=3, logprobs=0)
    _, told = ask(temperature=1.0, seed=4, n=3, logprobs=0)
    means = [
        sum(each.logprob for delta in told if delta.choice == choice for each in delta.logprobs) for choice in range(3)
    ]
    assert [delta.choice for delta in best] == [0]
    _, untold = ask(temperature=1.0, seed=4, best_of=3)
    assert not any(delta.logprobs for delta in untold)  # they were for choosing alone
    assert tokens_of(best) == answers[means.index(max(means))]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(temperature=-1), "temperature must lie between"),
        (dict(temperature=float("nan")), "temperature must be a number"),
        (dict(top_p=2), "top_p"),
        (dict(n=0), "n must lie"),
        (dict(n=3, best_of=2), "best_of"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(min_tokens=5, max_tokens=2), "min_tokens is 5"),
        (dict(stop=("",)), "must not be empty"),
        (dict(stop="END"), "a tuple of texts, not 'END'"),
        (dict(n=1.5), "n must be a whole number, not 1.5"),
        (dict(max_tokens=2.0), "max_tokens must be a whole"),
        (dict(seed=2**64), "seed must lie"),
        (dict(seed=10**400), "seed must lie between .* not a number of 1329 bits"),
        (dict(temperature=10**5000), "temperature must lie between"),
        (dict(temperature=None), "temperature must be a number, not None"),
        (dict(n=None), "n must be a number, not None"),
        (dict(min_tokens=None), "min_tokens must be a number, not None"),
        (dict(stop_ids=5), "stop_ids must be a tuple of token ids, not 5"),
        (dict(stop_ids=("a",)), "stop_ids must be a tuple of token ids"),
        (dict(stop=None), "stop must be a tuple of texts, not None"),
        (dict(logit_bias=[1]), "logit_bias must map tokens to numbers"),
        (dict(structure="json"), "structure must be a Structure, not 'json'"),
        (dict(logit_bias={999: 1.0}), "token 999"),
        (dict(stop_ids=(-1,)), "token -1"),
        (dict(stop_ids=(10**5000,)), "token a number of 16610 bits"),
        (dict(stop=("x",)), "tokenizer"),
    ],
)
def test_what_cannot_be_served_is_said(wrong, said):
    with pytest.raises(RequestError, match=said) as problem:
        ask(**wrong)
    assert problem.value.param in wrong


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([97], "token 97"), ([1, 2.0], "token 2.0"), (["a"], "token 'a'"), ([1] * 64, "64 tokens")],
)
def test_prompts_that_cannot_be_served(prompt, said):
    engine = make_engine()
    with pytest.raises(RequestError, match=said):
        engine.add(Request("r", prompt, SamplingParams()))
    check_empty(engine)


def test_without_filters_the_vocabulary_need_not_be_sorted():
    """And what is drawn is the same token: greedy rows, ties, and rows that are not finite among them."""
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 7] = logits[1].amax() + 1
    logits[1, 9] = logits[1, 7]
    logits[2, 3], logits[3, 5], logits[4] = torch.nan, torch.inf, -torch.inf
    seeds, temperature = torch.arange(40) * 977 - 5000, torch.linspace(0, 2, 40)
    temperature[1] = 0
    none = torch.zeros(40, dtype=torch.int32), torch.ones(40), torch.zeros(40)
    drawn = sample_unfiltered(logits, seeds, temperature)
    assert torch.equal(drawn, ops.sample.definition(logits, seeds, temperature, *none))
    assert drawn[1:5].tolist() == [7, -1, -1, -1]
    assert not SamplingParams(temperature=1.0).filters
    assert all(SamplingParams(**{name: 0.5 if name != "top_k" else 5}).filters for name in ("top_k", "top_p", "min_p"))
