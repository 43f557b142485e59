"""The server around the real engine: a tiny random model, many clients, and what goes wrong on the way. All of it with the
engine in the server's process and in another."""

import asyncio
import gc
import random
import resource
import threading
import time
from pathlib import Path

import httpx2
import openai
import patient
import pytest
from server_thread import served, served_apart
from test_endings import abandon, seconds_to_answer, until, usual_seconds

from tilestack.engine import AsyncEngine, Engine, EngineSettings

# In float32: for bfloat16 oneDNN keeps a kernel for each of the last 1,024 shapes of products, and memory grows up to that.
SMALL = EngineSettings(device="cpu", dtype="float32", max_sequences=16, kv_memory=1 << 20, step_tokens=256)
CHAT = {"messages": [{"role": "user", "content": "the cat sat"}]}


def in_one_process(engine):
    return served(AsyncEngine(engine, "tiny"))


@pytest.fixture(params=[in_one_process, served_apart])
def behind_http(request):
    return request.param


@pytest.fixture
def engine(folder):
    return Engine.load(folder, SMALL)


@pytest.fixture
def url(engine, behind_http):
    with behind_http(engine) as address:
        yield address


def idle_soon(engine, seconds=60):
    ends = time.monotonic() + seconds
    while (stats := engine.stats()).waiting + stats.running and time.monotonic() < ends:
        time.sleep(0.01)
    return stats.waiting + stats.running + stats.pages_used == 0


def test_the_same_seed_gives_the_same_text_streamed_or_not_alone_or_among_others(url):
    asked = dict(model="tiny", messages=CHAT["messages"], seed=11, max_tokens=24)
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        alone = client.chat.completions.create(**asked)
        streamed = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == alone.choices[0].message.content
        again = client.chat.completions.create(**asked, n=3)
    assert again.choices[0].message.content == alone.choices[0].message.content
    assert alone.usage.completion_tokens <= 24
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_two_hundred_requests_cut_off_leave_an_empty_engine_that_answers_within_a_second(url, engine):
    usual, before = usual_seconds(url), engine.stats().requests
    asyncio.run(abandon(url, 200, 0.5, lambda: engine.stats().requests == before + 200))
    assert seconds_to_answer(url) < max(1.0, 50 * usual)
    assert idle_soon(engine)
    made = engine.stats().completion_tokens
    assert patient.post(url + "/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200
    assert engine.stats().completion_tokens == made + 1  # nobody else's are made any more


def test_an_exception_in_the_model_fails_those_requests_and_the_server_lives(url, engine, monkeypatch):
    asked = CHAT | {"max_tokens": 4}

    def broken(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken_for_now:
        broken_for_now.setattr(engine.runner, "launch", broken)
        for stream in (False, True):
            failed = patient.post(url + "/v1/chat/completions", json=asked | {"stream": stream})
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_error")
    assert patient.post(url + "/v1/chat/completions", json=asked).status_code == 200
    assert patient.get(url + "/health").status_code == 200
    assert idle_soon(engine)


def test_a_full_queue_answers_429(folder, behind_http):
    engine = Engine.load(folder, EngineSettings(device="cpu", max_sequences=1, queue=1))

    async def ask_one_after_another(address):
        async with httpx2.AsyncClient(base_url=address, timeout=patient.LONG) as client:
            long = CHAT | {"max_tokens": 1500, "ignore_eos": True}
            asking = [asyncio.create_task(client.post("/v1/chat/completions", json=long)) for _ in range(2)]
            await until(lambda: (stats := engine.stats()).running == stats.waiting == 1)
            refused = await client.post("/v1/chat/completions", json=CHAT)
            asking[1].cancel()
            return refused.status_code, (await asking[0]).status_code

    with behind_http(engine) as address:
        for never in ({"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": "a", "best_of": 3}):
            refused = patient.post(address + "/v1/completions", json=never)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert asyncio.run(ask_one_after_another(address)) == (429, 200)


def test_structures_that_cannot_be_read_are_refused_and_others_are_kept_to(url):
    for form in ({"regex": "("}, {"json": "{"}, {"grammar": "start: nothing"}, {"json": {"type": "nonsense"}}):
        refused = patient.post(url + "/v1/chat/completions", json=CHAT | {"structured_outputs": form})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    kept = patient.post(
        url + "/v1/chat/completions", json=CHAT | {"structured_outputs": {"choice": ["the cat", "the dog"]}}
    )
    assert kept.json()["choices"][0]["message"]["content"] in ("the cat", "the dog")


def test_a_grammar_that_becomes_too_complex_is_the_clients_error(url, caplog):
    grows = {"regex": "((a{0,100}){0,100}){0,100}"}
    asked = CHAT | {"structured_outputs": grows, "max_tokens": 500, "min_tokens": 499}
    failed = patient.post(url + "/v1/chat/completions", json=asked)
    assert (failed.status_code, failed.json()["error"]["code"]) == (400, "structure_failed")
    assert "too complex" in failed.json()["error"]["message"]
    streamed = patient.post(url + "/v1/chat/completions", json=asked | {"stream": True})
    assert '"structure_failed"' in streamed.text
    assert not [record for record in caplog.records if record.exc_info]
    at_once = "start: " + " | ".join(f'"w{number}"' for number in range(3000))
    refused = patient.post(url + "/v1/chat/completions", json=CHAT | {"structured_outputs": {"grammar": at_once}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")


def test_hostile_stop_texts(url):
    """Some that every text holds, some that none does, some that are long and nearly there again and again."""
    asked = {"prompt": "the cat sat", "max_tokens": 48, "ignore_eos": True, "seed": 3}
    free = patient.post(url + "/v1/completions", json=asked).json()["choices"][0]["text"]
    often = max(free, key=free.count)
    for stops in (
        [often],
        [often * 200 + "x"],
        ["\x00", "\ufffd", "🙂", "(a+)+$"],
        [f"{free[:20]}{place}" for place in range(16)],
    ):
        choice = patient.post(url + "/v1/completions", json=asked | {"stop": stops}).json()["choices"][0]
        cut = min([free.find(stop) for stop in stops if stop in free], default=len(free))
        assert choice["text"] == free[:cut]
        assert choice["stop_reason"] in (*stops, None)


def test_tokens_that_the_model_does_not_know_are_refused(url):
    for path, field in (("completions", "prompt"), ("embeddings", "input")):
        refused = patient.post(f"{url}/v1/{path}", json={field: [5, 10**6]})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "token 1000000" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == field


def test_log_probabilities_and_embeddings_of_a_real_model(url):
    asked = {"prompt": "the cat sat", "max_tokens": 3, "echo": True, "logprobs": 2, "ignore_eos": True}
    told = patient.post(url + "/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in told["token_logprobs"][1:])
    assert len(told["tokens"]) == len(told["token_logprobs"])
    vector = patient.post(url + "/v1/embeddings", json={"input": "the cat"}).json()["data"][0]["embedding"]
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
    many = ["the dog", *["a mat"] * 80, "the cat"]  # more than are read at a time
    places = patient.post(url + "/v1/embeddings", json={"input": many}).json()["data"]
    assert len(places) == 82
    assert places[-1]["embedding"] == pytest.approx(vector, abs=1e-4)
    assert places[0]["embedding"] != pytest.approx(vector, abs=1e-2)


def memory() -> int:
    """Bytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def soak(url, count, seed):
    """Requests of every kind, some of them wrong, some cut off, 32 at a time."""
    dice, turns, statuses = random.Random(seed), asyncio.Semaphore(32), []

    async def one(client):
        kind, size = dice.random(), dice.randrange(1, 5)
        path, body = "/v1/completions", {"prompt": "the cat " * dice.randrange(1, 9), "max_tokens": size}
        if kind < 0.3:
            path, body = "/v1/chat/completions", CHAT | {"max_tokens": size, "stream": kind < 0.15}
        elif kind < 0.4:
            body |= {"temperature": "hot"}
        elif kind < 0.5:
            body |= {"n": 2, "logprobs": 2}
        elif kind < 0.6:
            texts = ["the dog", "the cat " * dice.randrange(1, 30)]
            path, body = "/v1/embeddings", {"input": texts, "pooling": "mean" if kind < 0.57 else "last"}
        elif kind < 0.61:
            body |= {"prompt": f"{size} " + "the cat " * 300}  # read in several steps
        elif kind < 0.63:
            body |= {"structured_outputs": {"regex": f"[a-z ]{{{size}}}"}}
        elif kind < 0.64:
            path, body = "/v1/chat/completions", CHAT | {"max_tokens": size, "response_format": {"type": "json_object"}}
        async with turns:
            try:
                wait = 0.005 if kind > 0.95 else patient.LONG
                statuses.append((await client.post(path, json=body, timeout=wait)).status_code)
            except httpx2.TimeoutException:
                statuses.append(0)

    async with httpx2.AsyncClient(base_url=url, limits=httpx2.Limits(max_connections=32)) as client:
        await asyncio.gather(*(one(client) for _ in range(count)))
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("behind_http", [served_apart], indirect=True)
def test_five_thousand_mixed_requests_leave_memory_flat(url, engine):
    held, statuses = [], []
    for part in range(5):
        statuses += asyncio.run(soak(url, 1000, part))
        assert idle_soon(engine)
        gc.collect()
        held.append(memory())
    assert set(statuses) <= {0, 200, 400}
    assert statuses.count(200) > 3500
    assert statuses.count(400) > 300
    assert held[-1] - held[1] < 24 << 20, [each >> 20 for each in held]
    assert threading.active_count() < 40
