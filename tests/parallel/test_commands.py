"""`tilestack train --processes` and those of alignment, as people start it: what it prints and leaves, and what becomes of it when a process dies."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pretraining
import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tilestack import models
from tilestack.parallel.launch import launch
from tilestack.parallel.processes import ProcessLost
from tilestack.train.checkpoint import Checkpoints
from tilestack.train.settings import as_toml

SECONDS = 240  # before a command is given up, on a machine with much else to do
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def command(*arguments):
    """A tilestack command in a process of its own, which is gone in the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tilestack", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    watch = threading.Timer(SECONDS, started.kill)  # with whom the processes it has started end too
    watch.start()
    try:
        yield started
    finally:
        watch.cancel()
        started.kill()
        started.communicate()


def process_of_rank(launcher: int, rank: int) -> int:
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_run_whose_process_is_killed_ends_and_is_continued(tmp_path):
    """It has the layers of the other's model that follow; those who continue share every layer."""
    texts, folder = pretraining.write_texts(tmp_path), tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(as_toml(pretraining.recipe(texts, 10**6, 1, **pretraining.STAGES).table()))
    endless = ["train", recipe, "--processes", 2, "--folder", folder]
    with command(*endless) as started:
        for line in started.stderr:
            if line.startswith("step 4/"):  # the checkpoint of step 2 is being written, if it is not there yet
                break
        os.kill(process_of_rank(started.pid, 1), signal.SIGKILL)
        said = started.communicate(timeout=SECONDS)[1]
    assert started.returncode == 1
    assert said.count("error on rank 0: another process of the run ended") == 1
    assert "error: the process of rank 1 was ended by SIGKILL" in said
    assert "Traceback" not in said

    done = Checkpoints(folder / "checkpoints", 9).steps()[-1]
    other = [part for key in ("pipeline=1", "tensor=2") for part in ("--set", f"parallel.{key}")]
    with command(*endless, "--set", f"run.steps={done + 2}", *other) as started:
        out, said = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, said
    assert said.count(f"resuming after step {done}") == 1
    assert out.count("loss") == 2  # of training and of held-out text, by one process
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, done + 3))
    assert [row["step"] for row in rows if "sample" in row] == [done + 2]
    assert models.load(folder / "model").config.heads == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.tensor=3"], "parallel.tensor = 3 needs a multiple of 3 processes, and there are 2; start 3"),
        (["parallel.pipeline=2", "parallel.context=2"], "parallel.pipeline = 2 does not go together with parallel.context = 2"),
        (["parallel.pipeline=2", "optimizer.name=adamw8bit", "precision.fp8=true", "lora.rank=2"], 'parallel.pipeline = 2 does not go together with optimizer.name "adamw8bit"'),
        (["parallel.pipeline=2", "lora.rank=2"], "parallel.pipeline = 2 does not go together with lora.rank = 2"),
        (["parallel.pipeline=2", "parallel.shard=true", "lora.rank=2"], "parallel.pipeline = 2 does not go together with lora.rank = 2"),
        (["parallel.pipeline=2", "parallel.schedule=zigzag"], "1f1b, gpipe, interleaved"),
        (["parallel.tensor=2", "optimizer.name=muon"], 'parallel.tensor = 2 does not go together with optimizer.name "muon"'),
        (["parallel.shard=true", "optimizer.name=adamw8bit"], 'parallel.shard does not go together with optimizer.name "adamw8bit"'),
        (["parallel.tensor=2", "precision.fp8=true", "run.compile=default"], "nor with run.compile"),
        (["parallel.expert=3"], "parallel.expert = 3 needs a multiple of 3 processes that read other tokens, and there are 2; start 3"),
        (["parallel.expert=2", "optimizer.name=adamw8bit"], 'parallel.expert = 2 does not go together with optimizer.name "adamw8bit"'),
        (["parallel.tensor=0"], "parallel.tensor must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_any_process_is_started(monkeypatch, capsys, tmp_path, settings, words):
    from tilestack.cli import main

    monkeypatch.setattr("tilestack.parallel.launch.launch", lambda *_: pytest.fail("a process was started"))
    sets = [part for setting in settings for part in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", "--processes", "2", "--folder", str(tmp_path / "run"), *sets])
    assert ended.value.code == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [
        (lambda: SignalException("", signal.SIGTERM), 143, ""),
        (lambda: failed(3), 3, ""),
        (
            lambda: failed(-signal.SIGKILL),
            None,
            "rank 1 was ended by SIGKILL, as a machine does that runs out of memory",
        ),
        (lambda: failed(-signal.SIGSEGV), None, "rank 1 was ended by SIGSEGV; the same command goes on"),
    ],
    ids=["asked to stop", "an error", "killed", "crashed"],
)
def test_a_launcher_ends_as_its_processes_do(monkeypatch, ended, code, words):
    def elastic_launch(config, program):
        assert (config.nproc_per_node, config.max_restarts, program) == (2, 0, sys.executable)
        assert int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 600  # seconds to save in
        assert os.environ["OMP_NUM_THREADS"] == "3"

        def run(*arguments):
            assert arguments == ("-m", "tilestack", "train", "demo")
            raise ended()

        return run

    monkeypatch.setattr(os, "environ", {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    with pytest.raises(ProcessLost, match=words) if words else nullcontext():
        assert launch(2, ["train", "demo"], "the same command goes on") == code


def failed(code: int) -> ChildFailedError:
    first = ProcessFailure(local_rank=1, pid=7, exitcode=code, error_file="")
    return ChildFailedError("tilestack", {1: first})


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("sft", ["parallel.tensor=3"], "parallel.tensor = 3 needs a multiple of 3 processes"),
        ("dpo", ["parallel.context=2"], "parallel.context = 2 is for train and sft"),
        ("sft", ["parallel.expert=2"], "parallel.expert = 2 is for train"),
        ("kto", ["parallel.shard=true", "optimizer.name=muon"], "parallel.shard does not go together with optimizer.name"),
        ("grpo", ["grpo.batch_invariant=true", "parallel.shard=true"], "grpo.batch_invariant needs the whole model"),
    ],
)  # fmt: skip
def test_alignment_refuses_what_cannot_be_before_any_process_is_started(monkeypatch, capsys, kind, settings, words):
    from tilestack.cli import main

    monkeypatch.setattr("tilestack.parallel.launch.launch", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as ended:
        main([kind, kind, "--processes", "2", *(part for setting in settings for part in ("--set", setting))])
    assert ended.value.code == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["train", "sft", "dpo", "kto", "grpo"])
def test_processes_are_started_with_the_same_command(monkeypatch, tmp_path, kind):
    from tilestack.cli import main

    given = []
    monkeypatch.setattr("tilestack.parallel.launch.launch", lambda *launched: given.append(launched) or 3)
    arguments = [kind, "demo" if kind == "train" else kind, "--set", "run.seed=4", "--folder", str(tmp_path), "--fresh"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--processes", "2"])
    ((processes, launched, advice),) = given
    assert (ended.value.code, processes) == (3, 2)
    assert [launched[0], *launched[2:]] == [arguments[0], *arguments[2:]]
    assert "the last checkpoint" in advice


def test_who_lost_another_process_is_told_of_checkpoints_where_there_are_some():
    from tilestack.parallel.processes import ProcessLost, as_lost

    closed = RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer. More")
    for advice, words in (("", "of its own"), ("go on", "of its own; go on")):
        told = as_lost(closed, advice)
        assert isinstance(told, ProcessLost)
        assert str(told).endswith(words)
        assert "(Connection closed by peer)" in str(told)


def test_one_process_needs_no_torch_distributed(monkeypatch):
    from tilestack.parallel.processes import joined

    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("a group was made"))
    with joined("cpu") as mesh:
        assert (mesh.world, mesh.rank, mesh.first, mesh.largest(3)) == (1, 0, True, 3)


def test_a_process_takes_the_gpu_of_its_place_on_its_machine(monkeypatch):
    """Of eight processes on two machines, with four GPUs each."""
    from tilestack.parallel.processes import take_gpu

    taken = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    given = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    take_gpu()
    assert taken == [2]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="rank 6 is process 2 of its machine, which has 2 GPUs"):
        take_gpu()
    assert taken == [2]


def test_a_process_stops_when_its_launcher_is_gone(monkeypatch):
    """It is asked once: who is asked twice ends without saving. It is ended when it has not stopped for long."""
    from tilestack.parallel import environment, processes

    parents, asked = itertools.chain([7] * 5, itertools.repeat(1)), queue.SimpleQueue()
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("os.kill", lambda *given: asked.put(given))
    slept: list[float] = []
    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr("os._exit", lambda code: asked.put((code, slept[-1])))
    monkeypatch.setenv(environment.LAUNCHER, "7")
    processes.end_with_launcher()
    assert asked.get(timeout=SECONDS) == (os.getpid(), signal.SIGTERM)
    assert asked.get(timeout=SECONDS) == (1, processes.PATIENCE.total_seconds())
    assert asked.empty()


@pytest.mark.parametrize(("launcher", "gone"), [("", False), ("7", False), ("8", True)])
def test_a_process_whose_launcher_was_gone_before_it_came_does_not_wait_for_others(monkeypatch, launcher, gone):
    from tilestack.parallel import environment, processes

    monkeypatch.setattr("os.getppid", lambda: 7)
    monkeypatch.setattr("threading.Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setenv(environment.LAUNCHER, launcher)
    if not launcher:  # torchrun does not say who it is
        monkeypatch.delenv(environment.LAUNCHER)
    with pytest.raises(processes.ProcessLost, match="started this one has ended") if gone else nullcontext():
        processes.end_with_launcher()
