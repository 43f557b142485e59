"""How requests end that do not end by themselves: clients that leave, time that is up, queues that are full."""

import asyncio
import json
import logging
import time
from types import SimpleNamespace

import httpx2
import patient
import pytest
from fake_engine import empty_soon
from prometheus_client import Counter

from tilestack.engine import EngineStats
from tilestack.extras import MissingExtra
from tilestack.server import events
from tilestack.server.app import create_app
from tilestack.server.metrics import Metrics, Stopwatch
from tilestack.server.request_log import JsonLines, RequestLog
from tilestack.server.settings import Limits, ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


async def until(condition):
    async with asyncio.timeout(patient.LONG):
        while not condition():
            await asyncio.sleep(0.02)


async def cut_off(url, fake, **body):
    """A request, given up when some of its answer was made; how that ended."""
    async with httpx2.AsyncClient(base_url=url, timeout=patient.LONG) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | body))
        await until(lambda: asked.done() or fake.totals.completion_tokens)
        asked.cancel()
        return (await asyncio.gather(asked, return_exceptions=True))[0]


async def abandon(url, count, seconds, begun):
    """So many requests, every other one streamed, whose connections are closed some seconds after all have begun."""
    address = httpx2.URL(url)
    writers = []
    for number in range(count):
        _, writer = await asyncio.open_connection(address.host, address.port)
        body = json.dumps(CHAT | {"stream": number % 2 == 0, "max_tokens": 1000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        writers.append(writer)
    await until(begun)
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.close()


def seconds_to_answer(url):
    """What one token takes."""
    began = time.monotonic()
    assert patient.post(url + "/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200
    return time.monotonic() - began


def usual_seconds(url):
    """The same of an idle server, once it is warm; it says how busy the machine is."""
    return max([seconds_to_answer(url) for _ in range(6)][1:])


def wait_for_the_log(caplog, requests=1):
    """The line of a request is written when its answer is gone."""
    deadline = time.monotonic() + patient.LONG
    while caplog.messages.count("request") < requests and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(serve, fake, stream):
    fake.pace = 0.05
    gone = asyncio.run(cut_off(serve(fake), fake, stream=stream, max_tokens=1000))
    assert isinstance(gone, asyncio.CancelledError)
    assert fake.submitted
    assert empty_soon(fake)


def test_a_stream_that_is_closed_ends_its_request(serve, fake):
    fake.pace = 0.05
    url = serve(fake)
    with patient.stream("POST", url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        events = response.iter_lines()
        next(events)
        assert fake.live
    assert empty_soon(fake)


def test_two_hundred_requests_cut_off_leave_a_server_that_answers_within_a_second(serve, fake):
    url = serve(fake)
    usual, before = usual_seconds(url), len(fake.submitted)
    fake.pace, fake.queue = 0.05, 1000
    asyncio.run(abandon(url, 200, 0.5, lambda: len(fake.submitted) == before + 200))
    assert seconds_to_answer(url) < max(1.0, 50 * usual)
    assert empty_soon(fake)
    made = fake.totals.completion_tokens
    assert patient.post(url + "/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200
    assert fake.totals.completion_tokens == made + 1  # nobody else's are made any more


async def ask_into_a_full_queue(url, full, make_room):
    """The answers to two requests, which fill the queue, and to three that come while it is full."""
    async with httpx2.AsyncClient(base_url=url, timeout=patient.LONG) as client:
        ask = lambda: client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1000})
        first = [asyncio.create_task(ask()) for _ in range(2)]
        await until(full)
        refused = await asyncio.gather(*(ask() for _ in range(3)))
        make_room()
        return await asyncio.gather(*first), refused


def test_a_full_queue_answers_429_and_when_to_come_back(serve, fake):
    fake.pace, fake.queue = 0.2, 2
    hurry = lambda: setattr(fake, "pace", 0.0)
    answered, (refused, *others) = asyncio.run(ask_into_a_full_queue(serve(fake), lambda: len(fake.live) == 2, hurry))
    assert [answer.status_code for answer in answered] == [200, 200]
    assert [answer.status_code for answer in (refused, *others)] == [429, 429, 429]
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"] | {"message": ""} == {
        "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full",
    }  # fmt: skip


def test_of_several_prompts_all_are_queued_or_none(serve, fake):
    fake.pace, fake.queue = 0.05, 2
    answer = patient.post(serve(fake) + "/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 429
    assert empty_soon(fake)


def test_time_that_is_up_is_a_504(serve, fake):
    fake.pace = 60
    url = serve(fake, limits=Limits(request_seconds=0.1))
    for stream in (False, True):
        late = patient.post(url + "/v1/chat/completions", json=CHAT | {"stream": stream})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert empty_soon(fake)


def test_texts_that_become_vectors_end_as_other_requests_do(serve, fake, caplog):
    """When the client leaves, when there is no room for all of them, and when the time is up."""
    fake.pace, fake.queue = 60, 2
    url = serve(fake, limits=Limits(request_seconds=0.1))

    async def leave():
        async with httpx2.AsyncClient(base_url=serve(fake), timeout=patient.LONG) as client:
            asked = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a", "b"]}))
            await until(lambda: len(fake.live) == 2)
            asked.cancel()

    asyncio.run(leave())
    assert empty_soon(fake)
    with caplog.at_level(logging.INFO, "tilestack.server"):
        refused = patient.post(url + "/v1/embeddings", json={"input": ["a", "b", "c"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert empty_soon(fake)
        late = patient.post(url + "/v1/embeddings", json={"input": ["a", "b"]})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert empty_soon(fake)
        fake.pace = 0.0
        assert patient.post(url + "/v1/embeddings", json={"input": [[1, 2], [3]]}).status_code == 200
        wait_for_the_log(caplog, 3)
    fields = [record.fields for record in caplog.records if record.getMessage() == "request"][-1]
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["first_token_seconds"]) == (3, 0, None)
    assert "tilestack_request_seconds_count 1.0" in patient.get(url + "/metrics").text


def test_the_time_of_a_request_is_for_all_of_its_texts_together(serve, fake):
    fake.pace = 0.03
    url = serve(fake, limits=Limits(request_seconds=0.3, prompts=1))
    late = patient.post(url + "/v1/embeddings", json={"input": [[1]] * 20})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert empty_soon(fake)


def test_time_that_is_up_in_a_stream_is_an_event(serve, fake, caplog):
    fake.pace = 0.02
    url = serve(fake, limits=Limits(request_seconds=2))
    with caplog.at_level(logging.INFO, "tilestack.server"):
        late = patient.post(url + "/v1/chat/completions", json=CHAT | {"stream": True})
        wait_for_the_log(caplog)
    *_, error, done = [line.removeprefix("data: ") for line in late.text.split("\n\n") if line]
    assert late.status_code == 200
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "timeout"
    assert empty_soon(fake)
    assert [record.fields["error"] for record in caplog.records if record.getMessage() == "request"] == ["timeout"]


def test_time_is_up_for_a_client_that_reads_nothing_too(fake, monkeypatch):
    """What it does not take fills the buffers, and from there on every `send` waits for it."""
    monkeypatch.setattr(events, "LAST_WORDS", 0.1)
    fake.pace = 0.01
    body = json.dumps(CHAT | {"stream": True}).encode()
    given = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = dict(type="http", method="POST", path="/v1/chat/completions", raw_path=b"", query_string=b"", headers=headers,
                 http_version="1.1", scheme="http", client=("127.0.0.1", 1), server=("localhost", 80))  # fmt: skip

    async def ask():
        stuck, pieces = asyncio.Event(), 0

        async def receive():
            return given.pop() if given else await stuck.wait()

        async def send(message):
            nonlocal pieces
            pieces += message["type"] == "http.response.body"
            if pieces > 3:
                await stuck.wait()

        app = create_app(fake, ServerSettings(limits=Limits(request_seconds=0.3)))
        async with asyncio.timeout(patient.LONG):
            await app(scope, receive, send)
        return app.state.service.drain

    drain = asyncio.run(ask())
    assert fake.submitted
    assert not fake.live
    assert (drain.requests, len(drain.running)) == (0, 0)


def test_an_engine_that_has_died_is_not_healthy(serve, fake):
    url = serve(fake)
    assert patient.get(url + "/health").status_code == 200
    fake.closed = True
    assert patient.get(url + "/health").status_code == 503


def test_a_fault_of_ours_is_a_500_with_an_id_and_a_traceback_in_the_log(serve, fake, caplog):
    def broken(*_, **__):
        raise ZeroDivisionError("secret of the inside")

    fake.submit = broken
    with caplog.at_level(logging.INFO, "tilestack.server"):
        answer = patient.post(serve(fake) + "/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "it"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert "it" in answer.json()["error"]["message"]
    assert any(record.exc_info for record in caplog.records)


def test_a_request_that_failed_keeps_no_server_from_ending(fake):
    fake.submit = lambda *_, **__: 1 / 0
    app = create_app(fake, ServerSettings())

    async def ask():
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/v1/chat/completions", json=CHAT)).status_code

    assert asyncio.run(ask()) == 500
    assert app.state.service.drain.requests == 0


def test_a_fault_after_the_answer_has_begun_is_no_second_answer(caplog):
    """Nothing can be told any more; whoever holds the connection has to close it."""
    sent = []

    async def broken(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def note(message):
        sent.append(message["type"])

    log = RequestLog(broken, Counter("answers", "", ["path", "status"], registry=None))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(log({"type": "http", "method": "GET", "path": "/", "headers": []}, None, note))
    assert sent == ["http.response.start"]
    assert any(record.exc_info for record in caplog.records)


def test_a_request_is_one_line_of_json_in_the_log(serve, fake, caplog):
    with caplog.at_level(logging.INFO, "tilestack.server"):
        patient.post(
            serve(fake) + "/v1/chat/completions", json=CHAT | {"max_tokens": 3}, headers={"X-Request-Id": "a\tb"}
        )
        wait_for_the_log(caplog)
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    line = json.loads(JsonLines().format(record))
    assert line["id"].startswith("req-")
    assert (line["path"], line["status"], line["completion_tokens"]) == ("/v1/chat/completions", 200, 3)
    assert line["first_token_seconds"] >= 0


def test_what_the_engine_cannot_do_here_or_any_more_has_a_status(serve, fake):
    def missing(structure):
        raise MissingExtra("structured output needs llguidance: pip install llguidance")

    fake.structures.matcher = missing
    url = serve(fake)
    absent = patient.post(url + "/v1/chat/completions", json=CHAT | {"response_format": {"type": "json_object"}})
    assert (absent.status_code, absent.json()["error"]["code"]) == (501, "not_installed")
    fake.closed = True
    ending = patient.post(url + "/v1/embeddings", json={"input": "a"})
    assert (ending.status_code, ending.json()["error"]["code"]) == (503, "ending")
    assert int(ending.headers["retry-after"]) > 0


def test_who_watches_a_server_is_answered_while_it_ends_and_others_are_turned_away(fake, caplog):
    app = create_app(fake, ServerSettings())
    app.state.service.drain.begun = True

    async def ask():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            return [(await client.get(path)).status_code for path in ("/metrics", "/health", "/v1/models", "/")]

    caplog.set_level(logging.INFO, "tilestack.server")
    assert asyncio.run(ask()) == [200, 503, 503, 503]
    logged = [record.fields["path"] for record in caplog.records if record.getMessage() == "request"]
    assert logged == ["/health", "/v1/models", "/"], "of what is asked every few seconds, only what is wrong"


def test_metrics(serve, fake):
    url = serve(fake, events_per_second=1e9)
    fake.pace = 0.02  # so that no two tokens of an answer share an event
    patient.post(url + "/v1/chat/completions", json=CHAT | {"max_tokens": 3, "n": 2})
    patient.get(url + "/v1/nothing")
    text = patient.get(url + "/metrics").text
    for line in (
        "tilestack_kv_use 0.25",
        "tilestack_requests_running 0.0",
        "tilestack_completion_tokens_total 6.0",
        "tilestack_time_to_first_token_seconds_count 1.0",
        "tilestack_inter_token_seconds_count 4.0",
        "tilestack_request_seconds_count 1.0",
        'tilestack_http_requests_total{path="/v1/chat/completions",status="200"} 1.0',
        'tilestack_http_requests_total{path="other",status="404"} 1.0',
    ):
        assert line in text


def test_each_figure_of_the_engine_is_told_under_its_own_name(fake):
    fake.stats = lambda: EngineStats(
        waiting=1, running=2, pages=40, pages_used=10, prompt_tokens=50, cached_tokens=5, completion_tokens=7,
        preemptions=8, drafted=9, accepted=11, requests=12,
    )  # fmt: skip
    told = dict(line.rsplit(" ", 1) for line in Metrics(fake).text().decode().splitlines() if line[0] != "#")
    expected = {
        "requests_waiting": 1, "requests_running": 2, "kv_pages": 40, "kv_pages_used": 10, "kv_use": 0.25,
        "prefix_hit_rate": 0.1, "prompt_tokens_total": 50, "cached_prompt_tokens_total": 5, "completion_tokens_total": 7,
        "preemptions_total": 8, "drafted_tokens_total": 9, "accepted_tokens_total": 11, "engine_requests_total": 12,
    }  # fmt: skip
    assert {name: float(told[f"tilestack_{name}"]) for name in expected} == expected


def test_tokens_that_come_together_share_the_time_since_the_last(fake, monkeypatch):
    metrics, moments = Metrics(fake), iter([0.0, 1.0, 3.0, 3.0])
    monkeypatch.setattr("tilestack.server.metrics.time", SimpleNamespace(perf_counter=lambda: next(moments)))
    watch = Stopwatch(metrics)
    watch.tokens(0, 1)
    watch.tokens(0, 4)
    watch.ended()
    told = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#")
    sums = {name: float(told[f"tilestack_{name}_sum"]) for name in ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds")}  # fmt: skip
    assert sums == {"time_to_first_token_seconds": 1.0, "inter_token_seconds": 0.5, "request_seconds": 3.0}
