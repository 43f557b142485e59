"""`tilestack serve --tensor 2`, as people start it: it answers as one process does, drains, and ends when one of them is killed."""

import os
import signal
import sys
from pathlib import Path

import httpx2
import patient
import pytest
import torch
from server_process import process

from tilestack import cli, models
from tilestack.engine import LLM, EngineSettings, SamplingParams

CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A tiny random model with heads for two, that goes on until it is told to stop."""
    folder = tmp_path_factory.mktemp("shared") / "tiny"
    torch.manual_seed(0)
    shape = dict(layers=2, heads=4, kv_heads=2, head_dim=16, positions=8192)
    decoder = models.Decoder(models.ModelConfig(tokenizer.vocabulary, 32, 64, **shape))
    with torch.no_grad():
        decoder.head.weight[list(tokenizer.stops)] = 0  # never the likeliest
    models.save(decoder, folder)
    tokenizer.save(folder)
    return folder


def shared(folder, *more):
    return [
        "-m",
        "tilestack",
        "serve",
        "--model",
        str(folder),
        "--tensor",
        "2",
        "--port",
        "0",
        "--device",
        "cpu",
        *more,
    ]


def process_of_rank(launcher, rank):
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_it_answers_as_one_process_and_drains(folder):
    asked = {"prompt": "the cat", "max_tokens": 40, "seed": 7, "temperature": 1.0}
    with process(*shared(folder, "--dtype", "float32", "--kv-memory", "0.001"), GLOO_SOCKET_IFNAME="lo") as server:
        follower = process_of_rank(server.process.pid, 1)
        with httpx2.Client(base_url=server.url, timeout=patient.LONG) as client:
            drawn = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            vector = client.post("/v1/embeddings", json={"input": "the cat"}).json()["data"][0]["embedding"]
            with client.stream("POST", "/v1/chat/completions", json=CHAT) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(follower, signal.SIGTERM)  # which is not for this one
                server.signal()
                rest = list(lines)
        assert server.end() == 0, server.lines
        assert "data: [DONE]" in rest
        assert ["warning" in line for line in server.lines if "Texts end at" in line] == [True]  # in the log, once
        assert not Path(f"/proc/{follower}").exists()
    alone = LLM(str(folder), EngineSettings(device="cpu", dtype="float32"))
    assert drawn == alone.generate("the cat", SamplingParams(max_tokens=40, seed=7)).text
    assert vector == pytest.approx(alone.embed("the cat"), abs=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_it_ends_when_one_of_its_processes_is_killed(folder, rank):
    with process(*shared(folder), GLOO_SOCKET_IFNAME="lo") as server:
        others = process_of_rank(server.process.pid, 1 - rank)
        with httpx2.stream("POST", f"{server.url}/v1/chat/completions", json=CHAT, timeout=patient.LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(process_of_rank(server.process.pid, rank), signal.SIGKILL)
            told = "" if rank == 0 else "\n".join(lines)
        assert server.end() == 1, server.lines
        said = "".join(server.lines)
        assert f"the process of rank {rank} was ended by SIGKILL" in said
        assert "start the server again" in said
        assert '"error"' in told or rank == 0
        assert not Path(f"/proc/{others}").exists()


@pytest.mark.parametrize("drain", ["3000", "inf"])
def test_a_launcher_waits_until_requests_have_had_their_time(folder, drain, monkeypatch):
    asked = {}
    monkeypatch.setattr("tilestack.parallel.launch.launch", lambda *_, **given: asked.update(given) or 0)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", str(folder), "--tensor", "2", "--device", "cpu", "--drain", drain])
    assert asked["ending"] > 3000


def test_another_number_than_torchrun_has_started_is_refused(folder, monkeypatch, capsys):
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(cli.serve, "engine_of", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", str(folder), "--tensor", "4"])
    assert "--tensor is 4, and 2 processes were started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tensor", "7"], "7 processes do not divide"),
        (["--weights", "int8"], "do not take weights; leave that out"),
        (["--chat-template", "nowhere"], "nowhere"),
        (["--draft-tokens", "3"], "set speculate"),
        (["--device", "gpu"], "--device must be cuda or cpu"),
        (["--device", "cpu:1"], "--device must be cuda or cpu"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused_before_any_process_is_started(folder, given, words, monkeypatch, capsys):
    monkeypatch.setattr("tilestack.parallel.launch.launch", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--model", str(folder), "--tensor", "2", *given])
    assert ended.value.code == 1
    assert words in capsys.readouterr().err
