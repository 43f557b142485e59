"""The engine and the server in two processes: what each does when the other is gone, slow, or talks nonsense."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx2
import patient
import pytest
from server_process import process
from server_thread import hosted, remote
from test_process import texts

from tilestack.engine import Engine, EngineClosed, EngineSettings, QueueFull, RequestError, SamplingParams, host
from tilestack.engine.messages import Malformed, framed, read_message, request_as_words
from tilestack.engine.sequence import Request
from tilestack.server.apart import ServerApart, ServerLost, serve, settings_from
from tilestack.server.settings import Limits, ServerSettings

SMALL = EngineSettings(device="cpu", dtype="float32", max_sequences=4, queue=4, kv_memory=1 << 20)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 4000, "ignore_eos": True}
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@pytest.fixture
def engine(folder):
    return Engine.load(folder, SMALL)


def until(condition):
    ends = time.monotonic() + patient.LONG
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


async def whole(stream):
    deltas = [delta async for delta in stream]
    return [token for delta in deltas for token in delta.ids], deltas[-1]


def test_requests_are_refused_at_once_and_counted_until_they_end(engine):
    async def ask(connection):
        async with remote(connection) as asking:
            assert asking.stats().pages == engine.pool.pages
            streams = [asking.submit([1, 2], LONG) for _ in range(6)]
            streams.append(asking.submit([1, 2], SamplingParams(n=1, best_of=2, max_tokens=3)))
            with pytest.raises(QueueFull, match="at most 4"):
                asking.submit([1, 2], LONG)
            with pytest.raises(RequestError, match="no adapter 'x'"):
                asking.submit([1], adapter="x")
            for stream in streams[:6]:
                stream.cancel()
                stream.cancel()
            ended = [await whole(stream) for stream in streams]
            assert {last.finish for _, last in ended[:6]} == {"cancelled"}
            assert streams[6].usage.completion == 6, "of both that were drawn"
            assert (asking.sequences, asking.streams) == (0, {})
            assert asking.stats().requests == 7
            told = asking.submit([5, 6, 7], SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1))
            assert len((await whole(told))[0]) == 1
            assert [likely and likely.id for likely in told.prompt_logprobs] == [None, 6, 7]
        with pytest.raises(EngineClosed):
            asking.submit([1, 2], LONG)

    with hosted(engine) as (_, connection):
        asyncio.run(ask(connection))
    assert not engine.requests


def submit(connection, number, *tokens, **params):
    asked = Request(f"request {number}", list(tokens), SamplingParams(ignore_eos=True, **params))
    connection.sendall(framed(["submit", number, request_as_words(asked)]))


def test_a_server_that_reads_nothing_neither_blocks_the_engine_nor_fills_its_memory(engine, monkeypatch):
    monkeypatch.setattr(host, "BEHIND", 2000)
    with hosted(engine) as (hosting, connection):
        read_message(connection)
        hosting.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        submit(connection, 0, 1, 2, max_tokens=3000)
        until(lambda: engine.busy and not hosting.may_step)
        steps = engine.totals.steps
        submit(connection, 1, 3, 4, max_tokens=3)  # which is heard all the same
        connection.sendall(framed(["cancel", 0]))
        until(lambda: engine.totals.requests == 2 and "request 0" not in engine.requests)
        assert engine.totals.steps == steps < 3000
        assert len(hosting.sender.unsent) < 4000
        made, ended = {0: 0, 1: 0}, {}
        while len(ended) < 2:  # now it reads, and misses nothing
            _, deltas, ends, _ = read_message(connection)
            for number, _, (_, ids, *_) in deltas:
                made[number] += len(ids)
            ended |= {number: drawn for number, drawn, _ in ends}
    assert made == ended
    assert made[1] == 3


@pytest.mark.parametrize(
    "said", [["nothing"], ["submit", 1], ["submit", 1, {"id": "a"}], ["cancel", "x"], ["cancel"], "words"], ids=str
)
def test_a_server_that_talks_nonsense_is_given_up(engine, said):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hosting = host.EngineHost(engine, "tiny", ours)
        read_message(theirs)
        theirs.sendall(framed(said))
        with pytest.raises(Malformed):
            hosting.serve()
        assert hosting.closed
        assert theirs.recv(1000) == b"", "so the server finds out"


@pytest.mark.parametrize(
    "said", [["nothing"], ["news", [[9, 0, [0] * 8]], [], []], ["news", [[1]], [], []], ["lost"], None], ids=str
)
def test_an_engine_that_talks_nonsense_or_ends_is_lost_to_all_who_wait(engine, said, caplog):
    async def ask():
        ours, theirs = socket.socketpair()
        host.EngineHost(engine, "tiny", ours)  # which never reads
        asking = remote(theirs)
        async with asking:
            streams = [asking.submit([1, 2], LONG) for _ in range(3)]
            ours.setblocking(True)
            ours.sendall(framed(said)) if said else ours.close()
            for stream in streams:
                _, last = await whole(stream)
                assert last.finish == "error"
                assert ("has ended" if said is None else "cannot be read") in last.error
            assert asking.closed
            assert asking.lost
            with pytest.raises(EngineClosed):
                asking.submit([1, 2], LONG)
            streams[0].cancel()
        ours.close()

    asyncio.run(ask())
    assert "the engine is lost" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_streams_end_when_the_engines_thread_dies(engine, monkeypatch):
    class Panic(BaseException):
        pass

    def panic():
        raise Panic

    async def ask(connection):
        async with remote(connection) as asking:
            _, last = await whole(asking.submit([1, 2], LONG))
            assert last.finish == "cancelled"
            async with asyncio.timeout(patient.LONG):
                while not asking.lost:
                    await asyncio.sleep(0.01)

    monkeypatch.setattr(engine, "step", panic)
    with hosted(engine) as (_, connection):
        asyncio.run(ask(connection))


def test_a_server_whose_engine_cannot_be_loaded_is_gone():
    with pytest.raises(RuntimeError, match="no such model"), ServerApart(ServerSettings(port=0)) as server:
        raise RuntimeError("no such model")
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
def test_a_server_that_ends_before_it_listens_is_told_with_a_way_out(engine, monkeypatch, code):
    words = [sys.executable, "-c", f"raise SystemExit({code})"]
    started = lambda inherited, log: subprocess.Popen(words, stderr=log, pass_fds=inherited)
    monkeypatch.setattr("tilestack.server.apart.start", started)
    greeted = []
    told = f"ended with exit code {code} before it listened; --one-process serves without it"
    with ServerApart(ServerSettings(port=0)) as server, pytest.raises(ServerLost, match=told):
        server.run(engine, "tiny", greeted.append)
    assert not greeted


def test_a_server_that_was_to_end_before_it_listened_has_not_failed(engine, monkeypatch):
    """As of Ctrl-C while it begins."""
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = lambda inherited, log: subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=inherited)
    monkeypatch.setattr("tilestack.server.apart.start", started)
    with ServerApart(ServerSettings(port=0)) as server:
        asked = host.EngineHost.ask_to_end
        monkeypatch.setattr(host.EngineHost, "ask_to_end", lambda self: (asked(self), server.process.stdin.close()))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        server.run(engine, "tiny", lambda address: None)
    assert server.asked
    assert not server.listened


@pytest.mark.parametrize(("lost", "code"), [(True, 1), (False, 0)])
def test_a_server_that_lost_its_engine_ends_with_an_error(engine, lost, code, monkeypatch):
    monkeypatch.setattr("tilestack.server.process.run_server", lambda engine, *_: lost and engine.lose("gone"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host.EngineHost(engine, "tiny", ours, asdict(ServerSettings()))
        assert serve(theirs, None) == code


def test_a_server_without_an_engine_ends_without_a_word(engine):
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert serve(theirs, None) == 0


def test_settings_arrive_as_they_were():
    given = ServerSettings(
        host="::1", api_key="k", cors=("*",), hosts=("a", "b"), drain=math.inf, sampling={"temperature": 0.5},
        limits=Limits(prompt_tokens=7),
    )  # fmt: skip
    assert settings_from(json.loads(json.dumps(asdict(given)))) == given


def command(folder, *more):
    return ["-m", "tilestack", "serve", "--model", str(folder), "--port", "0", "--device", "cpu", *more]


def children_of(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def server_of(process):
    """The process of the server, which the engine's has started."""
    (found,) = (child for child in children_of(process) if b"tilestack.server.apart" in Path(f"/proc/{child}/cmdline").read_bytes())  # fmt: skip
    return found


@contextmanager
def streaming(url):
    """The lines of an answer that has begun and is long."""
    with httpx2.stream("POST", url + "/v1/chat/completions", json=CHAT, timeout=patient.LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


@linux
def test_an_engine_that_is_killed_is_told_to_clients_and_leaves_no_server(folder):
    with process(*command(folder)) as serving:
        server = server_of(serving.process.pid)
        with streaming(serving.url) as lines:
            os.kill(serving.process.pid, signal.SIGKILL)
            told = list(lines)
        assert serving.end() == -signal.SIGKILL  # and standard error is closed, which the server had too
        until(lambda: not Path(f"/proc/{server}").exists())
    (error,) = [json.loads(line[6:])["error"] for line in told if '"error"' in line]
    assert "the engine's process has ended" in error["message"]
    assert told[-2:].count("data: [DONE]") == 1
    assert "traceback" not in "".join(serving.lines).lower()


@linux
def test_a_server_that_is_killed_takes_the_engine_along(folder):
    with process(*command(folder)) as serving:
        server = server_of(serving.process.pid)
        renderers = children_of(server)
        with streaming(serving.url) as lines:
            os.kill(server, signal.SIGKILL)
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)
        assert serving.end() == 1
        said = "".join(serving.lines)
        assert "the process of the server was ended by SIGKILL; start the server again" in said
        assert "traceback" not in said.lower()
        until(lambda: not any(Path(f"/proc/{each}").exists() for each in (server, *renderers)))


@linux
def test_signals_to_all_processes_are_one_and_a_second_ends_at_once(folder):
    """As of Ctrl-C in a terminal, and of what ends a service."""
    with process(*command(folder, "--drain", "600")) as serving:
        server = server_of(serving.process.pid)
        with streaming(serving.url) as lines:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(server, number)  # for which it has no ear
            serving.signal(signal.SIGINT)
            serving.wait_for("ending")
            assert "error" not in next(line for line in lines if line)
            assert patient.get(serving.url + "/health").status_code == 503
            serving.signal(signal.SIGINT)
            told = list(lines)
        assert serving.end() == 128 + signal.SIGINT
        until(lambda: not Path(f"/proc/{server}").exists())
    assert texts([line for line in told if line])[1] == ["model_error"]
    assert "traceback" not in "".join(serving.lines).lower()
