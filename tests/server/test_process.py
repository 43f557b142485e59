"""The server as a process: SIGTERM lets requests end and no more begin; a second one does not wait."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2
import patient
import pytest
import uvicorn
from server_process import process

from tilestack import cli
from tilestack.cli.serve import runs_apart
from tilestack.engine import LLM, EngineSettings, SamplingParams
from tilestack.server.app import create_app
from tilestack.server.listening import address_to_open, listen
from tilestack.server.process import GRACE, DrainingServer
from tilestack.server.settings import ServerSettings

FAKE = str(Path(__file__).with_name("server_process.py"))
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


def texts(lines):
    """What the events of a stream add up to, and the error in them."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", ()))
    return said, [event["error"]["code"] for event in events if "error" in event]


def begun_request(url, key):
    """A connection on which a request has begun; its body never comes."""
    address = httpx2.URL(url)
    made = socket.create_connection((address.host, address.port), timeout=patient.LONG)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json"
    made.sendall(f"{head}\r\nContent-Length: 99\r\n\r\n{{".encode())
    return made


def test_sigterm_drains(folder):
    """The whole command, with a real model: its text is that of any process, and its end is orderly."""
    command = ["-m", "tilestack", "serve", "--model", str(folder), "--port", "0", "--device", "cpu", "--drain", "600"]
    asked = {"prompt": "the cat", "max_tokens": 64, "seed": 7, "temperature": 1.0}
    with process(*command, TILESTACK_API_KEY="secret") as server:
        unsent = begun_request(server.url, "secret")  # as long as it is not sent, the server is not done
        with httpx2.Client(
            base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=patient.LONG
        ) as client:
            drawn = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            with client.stream(
                "POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 300, "ignore_eos": True}
            ) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                server.signal()
                server.wait_for("ending")
                refused = client.post("/v1/completions", json=asked)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ending")
                assert refused.headers["retry-after"]
                assert client.get("/health").status_code == 503
                unsent.close()
                *rest, done = [line for line in lines if line]
        assert server.end() == 0
    assert done == "data: [DONE]"
    assert texts([first, *rest])[1] == []
    assert json.loads(rest[-1][6:])["choices"][0]["finish_reason"] == "length"
    assert all(json.loads(line) for line in server.lines)
    assert "secret" not in "".join(server.lines)

    llm = LLM(str(folder), EngineSettings(device="cpu"))
    (here,) = llm.generate(["the cat"], SamplingParams(max_tokens=64, seed=7))
    assert here.text == drawn


def test_what_does_not_end_in_time_is_ended_with_an_error():
    with process(FAKE, "0.05", "0.3") as server:
        with patient.stream("POST", server.url + "/v1/chat/completions", json=CHAT) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            with ThreadPoolExecutor(1) as pool:
                vector = pool.submit(patient.post, server.url + "/v1/embeddings", json={"input": [1] * 2000})
                while "tilestack_requests_running 2.0" not in patient.get(server.url + "/metrics").text:
                    assert not vector.done()
                server.signal(signal.SIGINT)
                said, errors = texts([first, *lines])
        assert server.end() == 0
    assert said
    assert errors == ["ending"]
    assert (vector.result().status_code, vector.result().json()["error"]["code"]) == (503, "ending")
    assert "traceback" not in "".join(server.lines)


def test_a_second_signal_ends_at_once():
    with (
        process(FAKE, "0.05", "600") as server,
        patient.stream("POST", server.url + "/v1/chat/completions", json=CHAT) as stream,
    ):
        next(stream.iter_lines())
        server.signal()
        server.wait_for("ending")
        server.signal()
        assert server.end() == 128 + signal.SIGTERM  # in much less than the ten minutes


def test_a_server_that_stood_still_gives_clients_their_time_to_hear_of_the_end(fake, monkeypatch):
    """Its clock may be far beyond the end of the drain when it next looks."""
    now = [0.0]
    monkeypatch.setattr("tilestack.server.process.time", SimpleNamespace(monotonic=lambda: now[0]))
    app, cancelled = create_app(fake), []
    drain = app.state.service.drain
    drain.requests = 1
    monkeypatch.setattr(drain, "cancel", lambda: cancelled.append(now[0]))
    server = DrainingServer(uvicorn.Config(app), drain, 30.0, lambda: None, fake)
    server.handle_exit(signal.SIGTERM, None)
    ends = {}
    for moment in (1.0, 29.0, 99.0, 99.0 + GRACE, 99.1 + GRACE):
        now[0] = moment
        ends[moment] = asyncio.run(server.on_tick(1))
    assert min(cancelled) == 99.0
    assert list(ends.values()) == [False, False, False, False, True]


def test_a_lost_engine_ends_the_server_and_is_not_the_first_of_two_signals(fake, monkeypatch):
    monkeypatch.setattr("tilestack.server.process.os._exit", lambda code: pytest.fail(f"ended with {code}"))
    app = create_app(fake)
    drain = app.state.service.drain
    drain.requests = 1
    server = DrainingServer(uvicorn.Config(app), drain, 30.0, lambda: None, fake)
    ends = [asyncio.run(server.on_tick(1))]
    fake.lost = RuntimeError("gone")
    ends.append(asyncio.run(server.on_tick(1)))
    server.handle_exit(signal.SIGTERM, None)  # as a launcher sends that lost one of its processes
    ends.append(asyncio.run(server.on_tick(1)))
    drain.requests = 0  # its client was told
    ends.append(asyncio.run(server.on_tick(1)))
    assert ends == [False, False, False, True]


@pytest.fixture
def logs_as_before():
    """The command writes logs to standard error, which here is the test's and ends with it."""
    loggers = [logging.getLogger(name) for name in ("tilestack", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def error_of(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *arguments])
    assert ended.value.code == 1
    return capsys.readouterr().err


@pytest.mark.usefixtures("logs_as_before")
def test_bad_input_is_one_line(folder, capsys, monkeypatch, fake, serve):
    taken = httpx2.URL(serve(fake)).port
    refused = error_of(["--model", str(folder), "--port", str(taken)], capsys)
    assert "cannot listen on 127.0.0.1" in refused
    assert "give another --port" in refused
    assert "is no origin" in error_of(["--model", str(folder), "--port", "0", "--cors", "example.org"], capsys)
    assert "NAME=FOLDER" in error_of(["--model", str(folder), "--port", "0", "--adapter", "x"], capsys)
    assert "nowhere" in error_of(["--model", "nowhere", "--port", "0"], capsys)
    assert "model or none, not some" in error_of(["--model", str(folder), "--generation-config", "some"], capsys)
    asked = ["--model", str(folder), "--port", "0", "--device", "cpu"]
    assert "the model reads 4,096" in error_of([*asked, "--context", "99999999"], capsys)
    assert "set speculate" in error_of([*asked, "--draft-tokens", "3"], capsys)
    monkeypatch.setenv("TILESTACK_API_KEY", " ")
    assert "API key is empty" in error_of(["--model", str(folder)], capsys)


@pytest.mark.usefixtures("logs_as_before")
@pytest.mark.parametrize("source", ["model", "none"])
def test_a_model_is_served_with_its_own_sampling_and_a_template_from_a_file(
    folder, tmp_path, monkeypatch, capsys, source
):
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    served = []

    def run(engine, settings, listening, greet):
        stores = (settings.limits.stored, settings.limits.stored_bytes)
        served.append((settings.sampling, settings.split_reasoning, stores, engine.tokenizer.template))
        listening.close()
        greet("http://here")

    monkeypatch.setattr("tilestack.server.process.run_server", run)
    options = ["--one-process", "--generation-config", source, "--chat-template", str(template), "--split-reasoning"]
    options += ["--max-stored", "7", "--max-stored-bytes", "9000"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--model", str(own), "--port", "0", "--device", "cpu", *options])
    sampling = {"temperature": 0.6, "top_k": 20} if source == "model" else {}
    assert served == [(sampling, True, (7, 9000), template.read_text())]
    assert ("temperature 0.6, top_k 20; --generation-config none" in capsys.readouterr().out) == bool(sampling)
    assert ended.value.code == 0


def test_an_address_is_taken_once_though_nobody_serves_there_yet():
    with listen(ServerSettings(port=0)) as first, pytest.raises(ValueError, match="already in use"):
        listen(ServerSettings(port=first.getsockname()[1]))


@pytest.mark.parametrize(
    ("listening", "opened"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.0:8000", "http://10.0.0.0:8000"),
    ],
)
def test_an_address_that_a_browser_can_open(listening, opened):
    assert address_to_open(listening) == opened


@pytest.mark.skipif(os.name != "posix", reason="Windows has one process")
@pytest.mark.parametrize(
    ("device", "options", "apart"),
    [
        ("cpu", [], True),
        ("cuda", [], False),
        ("cuda:1", [], False),
        ("cpu", ["--one-process"], False),
        ("cuda", ["--two-processes"], True),
    ],
)
def test_http_has_a_process_of_its_own_on_a_cpu_or_where_asked(tmp_path, monkeypatch, device, options, apart):
    chosen = []

    @contextmanager
    def engine_of(model, settings, tensor, serve):
        serve()
        yield None

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("tilestack.cli.serve.engine_of", engine_of)
    monkeypatch.setattr("tilestack.cli.serve.server_of", lambda settings, apart: chosen.append(apart))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", str(tmp_path), "--port", "0", "--device", device, *options])
    assert chosen == [apart]


def test_windows_has_one_process(monkeypatch):
    monkeypatch.setattr("tilestack.cli.serve.os", SimpleNamespace(name="nt"))
    assert not runs_apart(None, "cpu")
    with pytest.raises(ValueError, match="does not work on Windows"):
        runs_apart(True, "cpu")
