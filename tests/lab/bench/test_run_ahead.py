"""Running ahead what is then timed: in other processes, which may fail, end early and know what files register."""

import os
import time

import pytest
import torch

from tilestack import contract, ops
from tilestack.lab.bench import operators as lab
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.bench.run_ahead import ONE_THREAD, call_and_tidy, run_ahead, single_threads


def write_process(path):
    path.write_text(f"{os.getpid()} {torch.get_num_threads()} {os.environ['TORCHINDUCTOR_COMPILE_THREADS']}")
    return path.name


def fail_or_die(path):
    if path.name == "dies":
        os._exit(1)
    raise ValueError("nothing is told of this")


def sleep_and_write(path):
    time.sleep(0.2)
    path.touch()
    return True


def test_others_do_it_with_a_thread_each_and_leave_no_trace_here(tmp_path, monkeypatch):
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    loaded = tmp_path / "mine.py"
    loaded.write_text(f"open({str(tmp_path / 'loaded')!r}, 'w').close()")
    assert run_ahead(write_process, [(tmp_path / "a",), (tmp_path / "b",)], jobs=2, files=[loaded]) == ["a", "b"]
    for name in "ab":
        process, threads, compiling = (tmp_path / name).read_text().split()
        assert int(process) != os.getpid()
        assert (threads, compiling) == ("1", "1")
    assert (tmp_path / "loaded").exists()
    assert not set(ONE_THREAD) & set(os.environ)


def test_threads_that_were_asked_for_here_are_again(monkeypatch):
    first, *others = ONE_THREAD
    monkeypatch.setenv(first, "7")
    for name in others:
        monkeypatch.delenv(name, raising=False)
    with single_threads():
        assert {name: os.environ[name] for name in ONE_THREAD} == ONE_THREAD
    assert {name: os.environ.get(name) for name in ONE_THREAD} == dict.fromkeys(others) | {first: "7"}


def test_a_call_that_fails_leaves_its_memory_to_the_others(monkeypatch):
    tidied = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: tidied.append(True))
    assert call_and_tidy(len, ("abc",)) == 3
    with pytest.raises(ZeroDivisionError):
        call_and_tidy(divmod, (1, 0))
    assert tidied == [True, True]


def test_what_fails_or_dies_is_no_failure_here(tmp_path):
    assert (
        run_ahead(fail_or_die, [(tmp_path / "fails",), (tmp_path / "dies",), (tmp_path / "fails",)], jobs=2)
        == [None] * 3
    )


def test_little_is_begun_after_the_time_is_over(tmp_path):
    paths = [(tmp_path / str(number),) for number in range(50)]
    done = run_ahead(sleep_and_write, paths, jobs=2, seconds=0.0)
    assert done.count(True) == len(list(tmp_path.iterdir())) < 10
    assert done.count(None) == 50 - done.count(True)


def test_every_candidate_of_a_subject_is_called_once_in_each_direction(outside):
    called = []

    def noting(x, dim):
        called.append((x.dtype, torch.is_grad_enabled()))
        return torch.softmax(x, dim)

    def broken(x, dim):
        raise RuntimeError("planted failure")

    contract.implements(ops.softmax, backend="broken", backward=contract.AUTOGRAD)(broken)
    contract.implements(ops.softmax, backend="noting", backward=contract.AUTOGRAD)(noting)
    case = next(case for case in ops.softmax.cases if case.kind == "check")
    lab.compile_subject("softmax", case.name, "float32", ("forward", "backward"), ["broken", "noting"], "cpu")
    assert called == [(torch.float32, False), (torch.float32, True)]


def test_a_bench_with_jobs_compiles_what_it_will_time_and_no_longer_than_its_share(monkeypatch):
    asked = []
    monkeypatch.setattr(lab, "run_ahead", lambda *given: asked.append(given) or [True])
    monkeypatch.setattr(lab, "measure_roofs", lambda device: Roofs(0.01, {"float32": 0.05}, 2.0))
    rows = lab.bench_operators(
        [ops.rms_norm], cases="5x1000", backends=["aten"], device="cpu", budget=100, jobs=3, files=["f.py"]
    )
    ((function, subjects, jobs, seconds, files),) = asked
    assert function is lab.compile_subject
    assert subjects == [("rms_norm", "5x1000", "float32", ["forward", "backward"], ["aten"], "cpu")]
    assert (jobs, seconds, files) == (3, 40.0, ["f.py"])
    assert [row.direction for row in rows] == ["forward", "backward"]
