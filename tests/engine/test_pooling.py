"""Texts as vectors: those of one forward over the whole text, however it was cut up and whatever ran beside it."""

import pytest
import tiny_models as tiny
import torch
from engines import alone, check_empty, check_pages, decoder, greedy, make_engine, serve, vector_alone

from tilestack.engine import LLM, Engine, EngineSettings, Request, RequestError, SamplingParams
from tilestack.kernels.cpu import build

SHORT, LONG = [3, 5, 7], [(37 * place) % 90 + 3 for place in range(40)]
TEXTS = [SHORT, LONG, [4], LONG[:17]]


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", ["smollm2", "qwen3_moe", "deepseek_v2", "gemma3"])
def test_a_vector_is_that_of_one_forward(family, pooling):
    for tokens, settings in ((7, {}), (64, dict(overlap=False)), (9, dict(graphs=True))):
        engine = make_engine(family=family, step_tokens=tokens, **settings)
        for text, found in zip(TEXTS, LLM(engine).embed(TEXTS, pooling, progress=False), strict=True):
            close(found, vector_alone(text, pooling, family))
        check_empty(engine)
    assert LLM(engine).embed(SHORT, pooling) == LLM(engine).embed([SHORT], pooling)[0]


@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.parametrize("overlap", [True, False])
def test_who_gives_way_has_the_same_vector(swap, overlap):
    """A sum begins again with its text, or goes on where its pages were swapped."""
    engine = make_engine(pages=11, step_tokens=8, swap_memory=swap, overlap=overlap)
    asked = [Request(pooling, LONG, priority=1, pooling=pooling) for pooling in ("mean", "last")]
    urgent = [greedy(f"urgent{n}", LONG[n : n + 20], 9) for n in range(2)]
    for request in asked:
        engine.add(request)
    for _ in range(3):
        assert engine.step() == []
    for request in urgent:
        engine.add(request)
    vectors, ids = {}, {request.id: [] for request in urgent}
    while engine.busy:
        for request, delta in engine.step():
            assert delta.error is None
            if request.pooling:
                vectors[request.id] = delta.vector
            else:
                ids[request.id] += delta.ids
        check_pages(engine)
    assert engine.stats().preemptions > 0
    for pooling, vector in vectors.items():
        close(vector, vector_alone(LONG, pooling))
    assert ids == {request.id: alone(request.prompt, 9) for request in urgent}
    assert len(vectors) == 2
    check_empty(engine)


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_who_gives_way_with_its_vector_in_flight_is_not_read_again(swap):
    engine = make_engine(max_sequences=1, step_tokens=64, swap_memory=swap)
    engine.add(Request("text", LONG, priority=1, pooling="mean"))
    assert engine.step() == []
    engine.add(greedy("urgent", SHORT, 3))
    ((request, delta),) = engine.step()
    assert (engine.stats().preemptions, request.id) == (1, "text")
    close(delta.vector, vector_alone(LONG, "mean"))
    check_pages(engine)
    assert [request.id for _ in range(3) for request, _ in engine.step()] == ["urgent"] * 3
    check_empty(engine)


def test_decoding_goes_on_beside_a_long_text():
    engine, order = make_engine(step_tokens=5), []
    engine.add(greedy("chat", [3, 5], 8))
    engine.step()
    engine.add(Request("text", LONG, pooling="mean"))
    while engine.busy:
        order += [request.id for request, _ in engine.step()]
    assert order == ["chat"] * 8 + ["text"]


def test_many_short_texts_share_a_step():
    engine = make_engine(max_sequences=64, step_tokens=128, pages=64)
    LLM(engine).embed([[n + 1, 2] for n in range(64)], progress=False)
    assert engine.stats().steps == 1
    assert engine.stats().completion_tokens == 0


def test_a_prefix_is_shared_with_prompts_but_for_a_mean_which_needs_all_states():
    engine = make_engine()
    asked = [Request(f"{n}", LONG[:17], pooling=pooling) for n, pooling in enumerate(("mean", "mean", "last"))]
    found = [LLM(engine).run([request])[0].completions[0].vector for request in asked]
    assert [request.cached for request in asked] == [0, 0, 16]
    close(found[1], vector_alone(LONG[:17], "mean"))
    close(found[2], vector_alone(LONG[:17], "last"))
    prompt = greedy("prompt", LONG[:17], 3)
    assert serve(engine, [prompt])["prompt"] == [alone(LONG[:17], 3)]
    assert prompt.cached == 16


def test_only_what_pools_leaves_the_graphs(monkeypatch):
    """The last state of a text needs none of those before it, so its first chunks are captured ones."""
    for pooling, expected in (("mean", [16, 16, 8]), ("last", [8])):
        engine = make_engine(graphs=True, step_tokens=16)
        forward, read = engine.runner.forward, []
        noting = lambda parts, ids, batch: (read.append(len(ids)), forward(parts, ids, batch))[1]
        monkeypatch.setattr(engine.runner, "forward", noting)
        close(LLM(engine).embed(LONG, pooling), vector_alone(LONG, pooling))
        assert read == expected


@pytest.mark.parametrize("speculate", ["lookup", "model"])
def test_nothing_is_guessed_for_a_text(speculate):
    draft = tiny.ours("qwen2").double() if speculate == "model" else None
    engine = make_engine(speculate=speculate, draft=draft)
    repeats = [3, 5, 7, 11] * 6
    close(LLM(engine).embed(repeats), vector_alone(repeats, "mean"))
    assert engine.stats().drafted == 0
    assert LLM(engine).generate([repeats], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), progress=False)[0].completions[0].ids == alone(repeats, 4)  # fmt: skip


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_in_batch_invariant_mode_the_bits_are_those_of_any_chunks_and_company(pooling):
    model, found = tiny.ours("qwen3").eval(), []
    for settings in (dict(step_tokens=64), dict(step_tokens=3), dict(step_tokens=7, max_sequences=1)):
        made = EngineSettings(page=4, kv_memory=1 << 20, context=48, batch_invariant=True, **settings)
        found.append(LLM(Engine(model, None, made)).embed(TEXTS, pooling, progress=False))
    found.append([LLM(Engine(model, None, made)).embed(text, pooling) for text in TEXTS])
    assert all(each == found[0] for each in found)


@pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")
def test_the_compiled_step_of_a_cpu_pools_too():
    model = tiny.ours("smollm2", hidden_size=48, intermediate_size=80, head_dim=32).eval()
    engine = Engine(model, None, EngineSettings(page=4, kv_memory=1 << 20, step_tokens=16))
    assert engine.runner.step is not None
    for pooling in ("mean", "last"):
        with torch.no_grad():
            states = [model.hidden(torch.tensor(text)) for text in TEXTS]
        for found, state in zip(LLM(engine).embed(TEXTS, pooling, progress=False), states, strict=True):
            expected = torch.nn.functional.normalize(state.mean(0) if pooling == "mean" else state[-1], dim=0)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_a_sum_is_kept_no_longer_than_its_text_is_read():
    engine = make_engine(step_tokens=32)
    engine.add(Request("text", LONG, pooling="mean"))
    assert engine.step() == []
    assert len(engine.runner.pooler.sums) == 1
    while not (told := engine.step()):
        assert not engine.runner.pooler.sums  # the vector is on its way to the host
    close(told[0][1].vector, vector_alone(LONG, "mean"))
    check_empty(engine)


def test_who_is_cancelled_leaves_no_sum():
    engine = make_engine(step_tokens=8)
    engine.add(Request("text", LONG, pooling="mean"))
    engine.step()
    assert engine.runner.pooler.sums
    ((_, delta),) = engine.cancel("text")
    assert (delta.finish, delta.vector) == ("cancelled", ())
    assert serve(engine, []) == {}
    check_empty(engine)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_states_that_are_not_finite_are_an_error_and_found_by_nobody(pooling, monkeypatch):
    engine = make_engine()
    forward = engine.runner.forward
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", lambda *given: forward(*given) * torch.nan)
        with pytest.raises(RuntimeError, match="hidden states are not finite"):
            LLM(engine).embed(LONG[:17], pooling)
    again = Request("again", LONG[:17], pooling="last")
    LLM(engine).run([again])
    assert again.cached == 0
    check_empty(engine)


def test_what_is_refused():
    engine = make_engine(context=20)
    llm = LLM(engine)
    assert len(llm.embed(LONG[:20])) == decoder().config.hidden  # no room is needed for an answer
    with pytest.raises(RequestError, match="the text has 21 tokens, and the model reads at most 20"):
        llm.embed(LONG[:21])
    with pytest.raises(RequestError, match="no pooling 'middle'; choose from mean, last"):
        llm.embed(SHORT, "middle")
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.embed([[]])
    with pytest.raises(RequestError, match="token 97"):
        llm.embed([1, 97])
    with pytest.raises(RequestError, match="draws no tokens"):
        llm.run([Request("both", SHORT, SamplingParams(max_tokens=3), pooling="mean")])
    check_empty(engine)
