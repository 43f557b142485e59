"""The load generator: what it asks and when, what it measures, and what it tells, against a server that is known."""

import asyncio
import itertools
import json
import random
import statistics
import xml.etree.ElementTree as ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from time import sleep

import pytest

from tilestack import cli
from tilestack.lab.serving.load import Ask, Objectives, Outcome, Target, client, make_workload, run_load, summary
from tilestack.lab.serving.load.arrivals import arrival_times
from tilestack.lab.serving.load.figures import percentile
from tilestack.lab.serving.load.plot import latency_plot, ticks
from tilestack.lab.serving.load.workload import LONGEST, Prefixes, parse_length


class Clock:
    """Shows the time that the server says it is; the server waits until the client has looked."""

    def __init__(self):
        self.now, self.looks, self.looked = 0.0, 0, Condition()

    def perf_counter(self):
        with self.looked:
            self.looks += 1
            self.looked.notify()
            return self.now

    def wait_for_looks(self, number):
        with self.looked:
            assert self.looked.wait_for(lambda: self.looks >= number, 120)


class Endpoint(BaseHTTPRequestHandler):
    """Answers in words, the first after 40 ms and the others 10 ms apart; refuses prompts that begin with 13."""

    asked, clock = [], None

    def log_message(self, *_):
        pass

    def reply(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, b'{"data": [{"id": "known"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        if body.get("prompt") == [13]:
            self.reply(429, b'{"error": {"message": "too many"}}')
            return
        self.reply(200, b"", "text/event-stream")
        chat, looks = "messages" in body, self.clock.looks if self.clock else 0
        for place in range(body["max_tokens"]):
            pause = 0.01 if place else 0.04
            if self.clock:
                self.clock.wait_for_looks(looks + place)
                self.clock.now += pause
            else:
                sleep(pause)
            piece = {"delta": {"content": "word "}} if chat else {"text": "word "}
            self.event({"choices": [{"index": 0, "finish_reason": None} | piece]})
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body):
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


event = Endpoint.event


@pytest.fixture
def endpoint():
    Endpoint.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_lengths():
    dice = random.Random(0)
    assert {parse_length("5", "input")(dice) for _ in range(9)} == {5}
    assert {parse_length("2:4", "input")(dice) for _ in range(99)} == {2, 3, 4}
    drawn = [parse_length("lognormal:100", "output")(dice) for _ in range(4000)]
    assert 85 < statistics.fmean(drawn) < 105  # the longest are cut
    assert statistics.median(drawn) < 75
    assert max(drawn) <= LONGEST
    assert parse_length("sharegpt", "input")(dice) >= 4
    for wrong in ("", "0", "9:3", "many", "lognormal:", "-4"):
        with pytest.raises(ValueError, match="--input takes"):
            parse_length(wrong, "input")


def test_a_workload_is_the_same_for_a_seed_and_shares_beginnings():
    make = lambda seed: make_workload(50, parse_length("9", "input"), parse_length("3:5", "output"), prefixes=Prefixes(20, 2), seed=seed)  # fmt: skip
    asks = make(1)
    assert asks == make(1) != make(2)
    assert {len(ask.prompt) for ask in asks} == {29}
    assert len({tuple(ask.prompt[:20]) for ask in asks}) == 2
    assert len({tuple(ask.prompt[20:]) for ask in asks}) == 50
    words = make_workload(3, parse_length("8", "input"), parse_length("1", "output"), text="one two three four five")
    assert {len(ask.prompt.split()) for ask in words} == {6}


@pytest.mark.parametrize("vocabulary", [1, 2, 101, 280, 10_000])
def test_random_ids_are_in_the_vocabulary(vocabulary):
    length = parse_length("2000", "input")
    (ask,) = make_workload(1, length, length, vocabulary=vocabulary)
    assert 0 <= min(ask.prompt) < max(ask.prompt) + 1 <= vocabulary


def test_arrivals_are_poisson_or_at_once():
    times = arrival_times(4000, 50.0, 0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.06)
    assert statistics.pstdev(gaps) == pytest.approx(0.02, rel=0.06)  # exponential: as large as the mean
    assert arrival_times(3, None, 0) == [0.0, 0.0, 0.0]


def test_in_an_open_loop_requests_are_sent_at_their_times(endpoint):
    outcomes = asyncio.run(run_load(Target(endpoint, "m"), [Ask([1], 1)] * 5, rate=50.0, seed=3))
    times = arrival_times(5, 50.0, 3)
    assert all(outcome.start >= at for outcome, at in zip(outcomes, times, strict=True))
    assert outcomes[4].start > outcomes[1].start


def test_times_of_a_known_server(endpoint, monkeypatch):
    monkeypatch.setattr(Endpoint, "clock", Clock())
    monkeypatch.setattr(client, "time", Endpoint.clock)
    outcomes = asyncio.run(run_load(Target(endpoint, "m"), [Ask([1], 5), Ask([2], 1)], concurrency=1, api_key="k"))
    first, short = outcomes
    assert first.ttft == pytest.approx(0.04)
    assert first.itl == pytest.approx([0.01] * 4)
    assert first.tpot == pytest.approx(0.01)
    assert first.latency == pytest.approx(0.08)
    assert (short.ttft, short.itl, short.tpot) == (pytest.approx(0.04), [], 0)
    assert (first.input_tokens, first.output_tokens, short.output_tokens) == (7, 5, 1)
    path, body, key = Endpoint.asked[0]
    assert (path, body["stream"], key) == ("/v1/completions", True, "Bearer k")


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_thoughts_are_tokens_too(name, endpoint, monkeypatch):
    """They are in the usage, so that a first token after them would make all others look fast."""
    monkeypatch.setattr(Endpoint, "clock", Clock())
    renamed = lambda body: json.loads(json.dumps(body).replace("content", name))
    monkeypatch.setattr(Endpoint, "event", lambda self, body: event(self, renamed(body)))
    monkeypatch.setattr(client, "time", Endpoint.clock)
    (outcome,) = asyncio.run(run_load(Target(endpoint, "m", chat=True), [Ask("a", 5)]))
    assert (outcome.ttft, outcome.tpot, len(outcome.itl)) == (pytest.approx(0.04), pytest.approx(0.01), 4)


def test_a_closed_loop_keeps_to_its_number(endpoint):
    outcomes = asyncio.run(run_load(Target(endpoint, "m"), [Ask([1], 2)] * 6, concurrency=2))
    assert summary(outcomes)["max_concurrent_requests"] == 2


def test_failures_are_counted_and_told(endpoint):
    outcomes = asyncio.run(run_load(Target(endpoint, "m"), [Ask([13], 2), Ask([1], 2)]))
    figures = summary(outcomes)
    assert (figures["completed"], figures["failed"]) == (1, 1)
    assert figures["errors"][0].startswith("429: ")
    nobody = asyncio.run(run_load(Target("http://127.0.0.1:1", "m"), [Ask([1], 2)]))
    assert "ConnectError" in nobody[0].error
    assert summary(nobody)["output_throughput"] == 0


def test_figures():
    outcomes = [Outcome(5.0, 0.1, [0.1] * 9, 1.0, 10, 10), Outcome(6.0, 0.3, [], 0.3, 10, 1), Outcome(5.0, error="x")]
    figures = summary(outcomes, Objectives.parse(["ttft:200", "e2el:2000"]))
    assert figures["duration"] == pytest.approx(1.3)
    assert figures["max_concurrent_requests"] == 1, "one ends where the next begins"
    assert figures["request_throughput"] == pytest.approx(2 / 1.3)
    assert figures["request_goodput"] == pytest.approx(1 / 1.3)
    assert figures["output_throughput"] == pytest.approx(11 / 1.3)
    assert figures["total_token_throughput"] == pytest.approx(31 / 1.3)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(100)  # as numpy and vLLM do it
    assert figures["median_tpot_ms"] == pytest.approx(100)  # of those with more than one token
    assert figures["p99_itl_ms"] == pytest.approx(100)
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    with pytest.raises(ValueError, match="ttft:MS"):
        Objectives.parse(["itl:3"])


def test_the_command_writes_what_vllm_bench_serve_does(endpoint, tmp_path, capsys):
    out, drawn = tmp_path / "load.json", tmp_path / "load.svg"
    options = ["--requests", "4", "--concurrency", "4", "--input", "3:6", "--output", "3", "--goodput", "ttft:9999"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["load", endpoint + "/v1", *options, "--json", str(out), "--plot", str(drawn)])
    assert ended.value.code == 0
    figures = json.loads(out.read_text())
    assert {
        "date", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration", "completed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput", "request_goodput",
        "input_lens", "output_lens", "ttfts", "itls", "errors",
        *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    } <= set(figures)  # fmt: skip
    assert (figures["model_id"], figures["completed"], figures["total_output_tokens"]) == ("known", 4, 12)
    assert len(Endpoint.asked) == 5  # with the one that warms up
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
    assert "TTFT" in capsys.readouterr().out


def test_a_server_that_refuses_random_ids_is_told_of_with_the_way_out(endpoint, monkeypatch, capsys):
    monkeypatch.setattr(Endpoint, "do_POST", lambda self: self.reply(400, b'{"error": {"message": "token 8836"}}'))
    with pytest.raises(SystemExit):
        cli.main(["load", endpoint.removeprefix("http://")])
    said = capsys.readouterr().err
    assert "token 8836" in said
    assert "--vocabulary" in said


def test_a_plot_is_of_those_that_were_answered():
    answered, failed = Outcome(0.0, 0.1, [0.1] * 9, 1.0, 10, 10), Outcome(0.0, 5.0, [7.0], 9.0, error="cut off")
    figures = summary([answered, failed])
    assert latency_plot([answered, failed], figures, "x") == latency_plot([answered], figures, "x")


def test_a_plot_of_nothing_says_so():
    assert "nothing measured" in latency_plot([], summary([]), "<nobody>")


@pytest.mark.parametrize(
    ("least", "most"), [(3.0, 3.0), (0.0, 0.0), (12.0, 480.0), (0.5, 9000.0), (99.0, 100.0), (1e-9, 1e9)]
)
def test_a_scale_spans_what_was_measured(least, most):
    scale = ticks(least, most)
    assert len(scale) >= 2
    assert scale == sorted(set(scale))
    assert scale[0] <= max(least, 1e-3)
    assert scale[-1] >= most


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chat"], "--text"),
        (["--input", "x"], "--input takes"),
        (["--goodput", "x"], "--goodput takes"),
        (["--plot", "x.png"], ".svg"),
        (["--plot", f"{__file__}/x.svg"], "cannot write"),
        ([], "does not tell its models"),
    ],
)
def test_bad_input_is_one_line(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["load", "http://127.0.0.1:1", *options])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "127.0.0.1:port", "http://", "ftp://127.0.0.1", "http://[::1"]
)
def test_an_address_of_no_server_is_one_line(url, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["load", url])
    assert ended.value.code == 1
    assert f"http://HOST:PORT, not {url!r}" in capsys.readouterr().err


class Closed(BaseHTTPRequestHandler):
    """Refuses whoever asks."""

    status = 401

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"no")

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("status", "options", "said"),
    [
        (401, [], "asks for an API key; give it by --api-key"),
        (401, ["--api-key", "x"], "takes another API key"),
        (404, [], "it answers 404, 'no'. Name one by --model"),
    ],
)
def test_why_the_models_are_not_told(status, options, said, capsys, monkeypatch):
    monkeypatch.setattr(Closed, "status", status)
    monkeypatch.delenv("TILESTACK_API_KEY", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(SystemExit):
            cli.main(["load", f"http://127.0.0.1:{server.server_port}", *options])
        server.shutdown()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata: [DONE]\r\n\r\n', None),  # as sse-starlette writes lines
        (b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n', None),  # tokens need not be text
        (b': hello\nevent: x\ndata:{"choices":[{"text":"a"}]}\n\n', None),
        (b'data: {"error": "busy"}\n\n', "busy"),
        (b"data: {broken\n\n", "not OpenAI's"),
        (b'data: {"choices": ["a"]}\n\n', "not OpenAI's"),
        (b'data: {"choices": [{"text": "a"}], "usage": {"tokens": 3}}\n\n', "not OpenAI's"),
        (b'data: {"choices": null}\n\n', "empty"),
        (b"<html></html>", "empty"),
    ],
)
def test_what_other_servers_say(said, error, monkeypatch, endpoint):
    monkeypatch.setattr(Endpoint, "do_POST", lambda self: self.reply(200, said, "text/event-stream"))
    (outcome,) = asyncio.run(run_load(Target(endpoint, "m"), [Ask([1], 5)]))
    assert (outcome.error is None) == (error is None), outcome.error
    assert error is None or error in outcome.error
