"""A row is of the present source, or is shown as older."""

import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_work import WORK

from tilestack import backend
from tilestack.lab import source, stale
from tilestack.lab.bench.optimizer_steps import CONTESTS, HALF_ONLY, OURS
from tilestack.lab.serving import bench_http, serve_candidates
from tilestack.lab.serving.bench_serve import SMALL
from tilestack.lab.training.train_steps import step_of, write_weights
from tilestack.server import apart
from tilestack.train import fp8


@pytest.fixture(autouse=True)
def _forget():
    yield
    for cached in (stale.present_source, stale.hash_of_parts):
        cached.cache_clear()


def test_a_row_is_current_while_its_hash_is_that_of_the_source():
    row = dict(op="softmax", backend="triton", source=stale.present_source("softmax", "triton"))
    assert stale.is_current(row)
    assert not stale.is_current(row | {"source": "0" * 16})
    assert not stale.is_current(dict(op="softmax", backend="triton")), "measured before rows had a hash"
    assert not stale.is_current(row | {"op": "no_such_operator"})
    assert not stale.is_current(row | {"backend": "removed", "source": ""})


def test_peers_have_no_source_of_ours():
    assert stale.present_source("softmax", "aten") == stale.present_source("adamw", "fused") == ""


@pytest.mark.parametrize(
    ("op", "changes_with", "is_left_by"),
    [
        ("adamw", "optim/adam.py", "kernels/softmax/rows.py"),
        ("train", "models/decoder.py", "models/gguf.py"),
        ("train", "train/fp8.py", "train/pretrain.py"),
        ("train", "train/fp8_head.py", "train/checkpoint.py"),
        ("train", "kernels/cuda/rms_norm.cu", "kernels/cpu/team.h"),
        ("train", "contract/native/signature.h", "kernels/cpu/team.h"),
    ],
)
def test_optimizers_and_training_steps_follow_the_files_they_run(monkeypatch, op, changes_with, is_left_by):
    _follows(monkeypatch, (op, "triton"), changes_with, is_left_by)


@pytest.mark.parametrize(
    ("row", "changes_with", "is_left_by"),
    [
        (("serve", "tilestack", "cpu"), "kernels/cpu/few_tokens.h", "kernels/attention/paged.py"),
        (("serve", "tilestack int8", "cpu"), "engine/cpu_weights.py", "server/app.py"),
        (("serve", "tilestack", "cuda"), "kernels/cuda/decode_step.cu", "kernels/cpu/few_tokens.h"),
        (("serve", "tilestack", "cuda"), "lab/serving/serve_workloads.py", "models/gguf.py"),
        (("serve", "vllm", "cuda"), "lab/serving/serve_workloads.py", "engine/engine.py"),
        (("serve", "tilestack", "cuda"), "contract/native/signature.h", "kernels/cpu/few_tokens.h"),
        (("serve", "tilestack", "cuda"), "engine/scheduler.py", "engine/asynchronous.py"),
        (("http", "http", "cpu"), "server/events.py", "lab/serving/serve_workloads.py"),
        (("http", "http", "cpu"), "engine/delta_queue.py", "lab/serving/serve_workloads.py"),
        (("http", "offline", "cuda"), "engine/scheduler.py", "kernels/loss/cross_entropy.py"),
    ],
)
def test_engines_follow_the_files_they_run_and_their_workloads(monkeypatch, row, changes_with, is_left_by):
    _follows(monkeypatch, row, changes_with, is_left_by)


def _follows(monkeypatch, row, changes_with, is_left_by):
    before = stale.present_source(*row)
    for changed, same in ((is_left_by, True), (changes_with, False)):
        assert (stale.PACKAGE / changed).exists()
        monkeypatch.setattr(
            stale,
            "code_wherever_it_lies",
            lambda path: "x = 1" if path == stale.PACKAGE / changed else source.code_wherever_it_lies(path),
        )
        _clear()
        assert (stale.present_source(*row) == before) is same


def test_an_engine_s_row_is_current_on_its_device_alone():
    row = dict(op="serve", backend="tilestack", device="cpu", source=stale.present_source("serve", "tilestack", "cpu"))
    assert stale.is_current(row)
    assert not stale.is_current(row | {"device": "cuda"})
    assert not stale.is_current(dict(op="serve", backend="tilestack")), "measured before rows had a hash"


def _clear():
    stale.present_source.cache_clear()
    stale.hash_of_parts.cache_clear()


def test_every_part_named_is_there():
    steps = (*stale.OF_A_TRAINING_STEP, *stale.OF_AN_OPTIMIZER, *stale.OF_AN_ENGINE, *stale.OF_A_SERVER, *stale.OF_STREAMS, *stale.OF_A_WORKLOAD, *stale.OF_A_RUN)  # fmt: skip
    assert all(any(stale.PACKAGE.glob(part)) for part in (*steps, *sum(stale.OF_A_DEVICE.values(), ())))


@pytest.mark.parametrize("candidate", ["tilestack", "tilestack-graph", "tilestack-fp8-head"])
def test_a_training_step_runs_nothing_that_its_rows_do_not_follow(candidate, tmp_path, monkeypatch):
    """Else a row would be called current though what it measured has changed."""
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")  # the definitions compute it
    step = step_of(candidate, write_weights(WORK, tmp_path))
    step()
    ours = _files_run_by(step)
    measures = {path for path in ours if path.is_relative_to(stale.PACKAGE / "lab")}
    assert stale.PACKAGE / "train" / "step.py" in ours
    assert (stale.PACKAGE / "train" / "fp8_head.py" in ours) is (candidate == "tilestack-fp8-head")
    assert ours - measures <= stale.files_of_parts(stale.OF_A_TRAINING_STEP)


@pytest.mark.parametrize("name", CONTESTS)
def test_an_optimizer_runs_nothing_that_its_rows_do_not_follow(name):
    half = torch.bfloat16 if name in HALF_ONLY else torch.float32
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=half))
    param.grad = torch.ones_like(param)
    optimizer = CONTESTS[name][OURS]([param])
    with backend("triton"):
        ours = _files_run_by(optimizer.step)
    interpreter = {path for path in ours if path.name.startswith("interpreter")}
    assert stale.PACKAGE / "kernels" / "optim" / "multi_tensor.py" in ours
    assert ours - interpreter <= stale.files_of_parts(stale.OF_AN_OPTIMIZER)


@pytest.mark.parametrize(
    ("name", "device", "runs"),
    [
        ("tilestack", "cpu", "kernels/cpu/decode_step.py"),
        ("tilestack int8", "cpu", "kernels/cpu/decode_step.py"),
        ("tilestack lookup", "cpu", "engine/speculation.py"),
        ("tilestack", "cuda", "kernels/attention/paged.py"),
    ],
)
def test_an_engine_runs_nothing_that_its_rows_do_not_follow(name, device, runs):
    """That of a GPU runs its kernels in the interpreter."""
    shape = SMALL | dict(num_hidden_layers=1, vocab_size=64, hidden_size=32, intermediate_size=32, head_dim=16)
    asked = dict(device="cpu", model=None, shape=shape)
    decoder = serve_candidates.decoder_of(asked)
    with backend("triton" if device == "cuda" else "auto"):
        serve = serve_candidates.serve_of(name, decoder.half() if device == "cuda" else decoder, asked, 32)
        serve([[1, 2, 3]], [2], 0.6)
        ours = _files_run_by(lambda: serve([[4, 5, 4], [6, 7]], [3, 3], 0.6))
    assert stale.PACKAGE / runs in ours
    assert ours <= stale.files_of_parts(stale.parts_of_serving("serve", name, device))


def test_a_server_runs_nothing_that_its_rows_do_not_follow(monkeypatch):
    monkeypatch.setattr(bench_http, "STREAMS", 2)
    engine = bench_http.engine_of("cpu", None, 8)
    asked = bench_http.Workload(2, "3", "3", seed=0)
    monkeypatch.setattr(apart, "start", in_this_process)
    over = (bench_http.in_one_process, bench_http.in_two_processes)
    ours = _files_run_by(
        lambda: [bench_http.offline(engine, asked), *[bench_http.over_http(engine, asked, serving) for serving in over]]
    )
    assert {stale.PACKAGE / part for part in ("server/events.py", *stale.OF_STREAMS)} <= ours
    assert ours <= stale.files_of_parts(stale.parts_of_serving("http", "http", "cpu"))


def in_this_process(inherited, log):
    """The server as a thread, where what it runs is noted."""
    sockets = [socket.socket(fileno=os.dup(number)) for number in inherited]
    thread = threading.Thread(target=apart.serve, args=sockets, daemon=True)
    thread.start()
    return SimpleNamespace(pid=os.getpid(), kill=list, wait=thread.join)


def _files_run_by(call):
    """Our files that a call runs, in threads that it starts too."""
    ran = set()
    note = lambda frame, *_: ran.add(frame.f_code.co_filename)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {path for path in map(Path, ran) if path.is_relative_to(stale.PACKAGE)}
