"""Proofs in several processes: the same as in one, and a worker that dies takes nothing with it."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilestack import ops
from tilestack.lab.proof import proofs, proved, workers
from tilestack.lab.proof.claims import Proof
from tilestack.lab.proof.workers import Task, parts_of, prove_tasks, start_worker, tasks_for
from tilestack.lab.source import source_hash

CPU = torch.device("cpu")
DYING = """
import os
from tilestack import contract, ops

contract.implements(ops.axpy, backend="dying")(lambda x, y, alpha: os._exit(7))
"""


def quick(*names, backend=None):
    only = dict.fromkeys(names, backend) if backend else {}
    operators = [ops.operator_named(name) for name in names]
    return tasks_for(operators, CPU, only=only, dtypes=[torch.float32], kinds=("check",), every_variant=False)


def test_workers_prove_what_one_process_proves_and_outlive_one_that_dies(tmp_path: Path):
    dying = tmp_path / "dying.py"
    dying.write_text(DYING)
    tasks = [*quick("add", "relu"), Task("axpy", torch.float32, CPU, "dying", every_variant=False)]
    found = dict(prove_tasks(tasks, jobs=2, files=[dying]))
    assert set(found) == set(tasks)
    assert all(found[task] == task.proofs() for task in tasks[:2])
    (refuted,) = found[tasks[2]]
    assert refuted.ok is False
    assert refuted.message == "the process that proved it died, exit code 7"


def test_workers_share_the_cases_of_a_long_task(monkeypatch):
    (task,) = quick("add", backend="triton")
    assert parts_of(task) == [task]
    monkeypatch.setattr(workers, "CLAIMS_IN_A_PART", 4)
    parts = parts_of(task)
    assert len(parts) > 2
    assert [claim for part in parts for claim in part.claims()] == list(task.claims())
    assert dict(prove_tasks([task], jobs=2)) == {task: task.proofs()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_begun_when_the_time_is_over(jobs):
    assert dict(prove_tasks(quick("add", "relu"), jobs, budget=0)) == {}


def test_what_has_no_proof_that_stands_is_proved_again():
    def left(*kept, names=("relu", "linear")):
        return {(task.operator, task.backend) for task in proofs.unproved(quick(*names), kept)}

    def line(direction, source=None, wrong=0):
        source = source or source_hash("relu", "triton")
        return dict(op="relu", backend="triton", dtype="float32", direction=direction, wrong=wrong, source=source)

    everything = left()
    assert everything >= {("relu", "triton"), ("linear", "triton"), ("linear", "triton_naive")}
    assert not {("relu", "torch"), ("relu", "aten")} & everything
    assert left(line("forward"), line("backward")) == everything - {("relu", "triton")}
    for lost in (line("backward", source="older"), line("backward", wrong=1)):
        assert left(line("forward"), lost) == left(lost, line("forward")) == everything
    (only,) = proofs.unproved(quick("linear", backend="triton_naive"), [])
    assert only.backend == "triton_naive"


def test_what_a_backend_takes_in_no_case_is_nothing_to_prove():
    asked = lambda dtype: tasks_for(
        [ops.operator_named("sample")], CPU, only={}, dtypes=[dtype], kinds=("check",), every_variant=True
    )
    assert [task.backend for task in proofs.unproved(asked(torch.float32), [])] == ["triton"]
    assert proofs.unproved(asked(torch.float64), []) == []


def test_where_not_all_may_be_begun_the_shortest_come_first(monkeypatch):
    monkeypatch.setattr(workers, "CLAIMS_IN_A_PART", 1)
    begun = []
    monkeypatch.setattr(workers, "prove_apart", lambda parts, *_: (begun.extend(parts), iter(()))[1])
    tasks = [*quick("add", backend="triton"), *quick("softmax", backend="triton")]
    lengths = {task.operator: len(parts_of(task)) for task in tasks}
    assert len(set(lengths.values())) == 2
    for budget, order in ((math.inf, lambda length: -length), (60, lambda length: length)):
        begun.clear()
        assert list(prove_tasks(tasks, jobs=2, budget=budget)) == []
        assert list(dict.fromkeys(part.operator for part in begun)) == sorted(lengths, key=lambda n: order(lengths[n]))


def test_ctrl_c_in_the_terminal_is_not_for_a_worker(capfd):
    connection, process = start_worker([])
    os.kill(process.pid, signal.SIGINT)  # while it imports
    (task,) = quick("relu")
    connection.send(task)
    os.kill(process.pid, signal.SIGINT)  # and while it proves, perhaps
    assert connection.recv() == task.proofs()
    process.kill()
    assert "KeyboardInterrupt" not in capfd.readouterr().err


FIRST_START = """
import multiprocessing, signal
from tilestack.lab.proof.child_process import start_without_ctrl_c

def tell(answer):
    answer.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=tell, args=(there,))
        start_without_ctrl_c(process)
        print(here.recv(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_not_even_for_the_first_that_is_started(tmp_path):
    """The first start also starts a process of multiprocessing's own, which unblocks the signal."""
    script = tmp_path / "first_start.py"
    script.write_text(FIRST_START)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert done.stdout.split() == ["True", "False"] * 2, done.stderr


def proof(ok, direction="forward", message=""):
    return Proof("relu", "triton", "33", "plain", "float16", direction, ok, message=message)


def test_proofs_are_kept_by_source_and_replaced_by_later_ones(tmp_path: Path):
    path = tmp_path / "h200" / "proofs.json"
    when = lambda commit: dict(commit=commit, date="2031-01-01T00:00:00Z")
    proofs.save_proofs(path, when("a"), [proof(True), proof(True), proof(None, message="says nothing: out")])
    proofs.save_proofs(
        path, when("b"), [proof(False, "backward", "off by 2"), proof(None, message="it has no backward")]
    )
    forward, backward = proofs.load_proofs(path)
    assert forward == dict(
        op="relu", backend="triton", dtype="float16", direction="forward", proved=2, wrong=0, says_nothing=1, refuted=[], worst=0.0,
        source=source_hash("relu", "triton"), commit="a", date="2031-01-01T00:00:00Z",
    )  # fmt: skip
    assert (backward["wrong"], backward["commit"]) == (1, "b")
    assert backward["refuted"] == ["33 plain: off by 2"]
    (line,) = [line for line in proved.standings(tmp_path, "h200") if (line.op, line.backend) == ("relu", "triton")]
    assert line.status == "1 of 3 claims fail"
    proofs.save_proofs(path, when("c"), [proof(True)])
    assert [line["commit"] for line in proofs.load_proofs(path)] == ["c", "b"]


def test_what_took_no_case_is_not_asked_again_until_it_changes(tmp_path: Path):
    path, now = tmp_path / "h200" / "proofs.json", dict(commit="a", date="2031-01-01T00:00:00Z")
    task = Task("relu", torch.float32, CPU, "triton")
    refused = [Proof("relu", "triton", "33", "plain", "float32", way, None, message="too few digits") for way in ("forward", "backward")]  # fmt: skip
    assert proofs.unproved([task], []) == [task]
    proofs.save_proofs(path, now, refused)
    kept = proofs.load_proofs(path)
    assert [(line["direction"], line["proved"]) for line in kept] == [("forward", 0)]
    assert proofs.unproved([task], kept) == []
    assert all(line.status == "no proof" and not line.dtypes for line in proved.standings(tmp_path, "h200"))
    assert proofs.unproved([task], [line | {"source": "older"} for line in kept]) == [task]
    proofs.save_proofs(path, now, [proof(True), *refused])  # in another dtype it takes some
    (line,) = [line for line in proved.standings(tmp_path, "h200") if (line.op, line.backend) == ("relu", "triton")]
    assert (line.status, line.dtypes) == ("yes", ["float16"])


def test_the_largest_error_is_told_as_a_part_of_what_was_allowed():
    found = [Proof("relu", "triton", "33", "plain", "float16", "forward", True, error=e, bound=b) for e, b in ((1.0, 4.0), (3.0, 100.0))]  # fmt: skip
    (line,) = proofs.summed_up(found, dict(commit="a", date="2031-01-01T00:00:00Z"))
    assert line["worst"] == 0.25


@pytest.mark.parametrize(
    ("answer", "started"),
    [(proof(False, message="CUDA error: an illegal memory access"), 3), (proof(False, message="off by 2"), 1), (proof(True), 1)],
)  # fmt: skip
def test_a_worker_whose_gpu_is_broken_is_not_asked_again(answer, started, monkeypatch):
    """What it would say of the next task would be about the GPU, and not about the task."""
    workers_made = []

    def start(files):
        ours, theirs = multiprocessing.Pipe()

        def work():
            with suppress(EOFError):
                while theirs.recv():
                    theirs.send([answer])

        threading.Thread(target=work, daemon=True).start()
        workers_made.append(ours)
        return ours, SimpleNamespace(kill=lambda: None)

    monkeypatch.setattr(workers, "start_worker", start)
    tasks = quick("add", "relu", "softmax")
    assert list(workers.prove_apart(tasks, 1, [], lambda task: True)) == [(task, [answer]) for task in tasks]
    assert len(workers_made) == started


def test_a_process_that_dies_leaves_nothing_proved_until_it_is_tried_again(tmp_path: Path):
    """Whichever of its backends it died of: each loses its proof, and gets it back when it is proved by itself."""
    path, now = tmp_path / "h200" / "proofs.json", dict(commit="a", date="2031-01-01T00:00:00Z")
    task = Task("linear", torch.float32, CPU)
    proved_of = lambda backend: Proof("linear", backend, "33", "plain", "float32", "forward", True)
    stands = lambda: {
        line.backend for line in proved.standings(tmp_path, "h200") if line.op == "linear" and line.is_proved
    }
    left = lambda: {each.backend for each in proofs.unproved([task], proofs.load_proofs(path))}
    backends = left()
    proofs.save_proofs(path, now, map(proved_of, backends))
    assert stands() == backends
    assert left() == set()
    proofs.save_proofs(path, now, task.refuted("the process that proved it died, exit code 7"))
    assert stands() == set()
    assert left() == backends
    proofs.save_proofs(path, now, [proved_of("triton")])
    assert stands() == backends - left() == {"triton"}


def test_a_process_that_dies_names_the_cases_it_was_at():
    part = replace(quick("relu")[0], backend="triton", case_names=frozenset({"4x128", "3x33"}))
    assert [proof.case for proof in part.refuted("it died")] == ["3x33, 4x128"]


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "proofs.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="is no file of proofs"):
        proofs.load_proofs(path)
    assert proofs.load_proofs(tmp_path / "none.json") == []
