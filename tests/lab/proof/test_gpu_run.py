"""How the tests of tests/gpu are shared among processes, and what is remembered of them."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "gpu" / "run.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("gpu_run", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_that_hold_the_gpu_have_one_process_and_large_proofs_two(runner):
    alone = [
        f"tests/gpu/{start}{'_of' if '::' in start else '::test_'}{number}"
        for start in runner.ALONE
        for number in range(4)
    ]
    large = [f"tests/gpu/test_operators.py::test_every_implementation_is_proved[{name}-bench]" for name in "abc"]
    rest = [
        f"tests/gpu/{file}.py::test_other[{number}]"
        for file in ("test_engine", "test_operators")
        for number in range(6)
    ]
    steps = [
        f"tests/gpu/{runner.IN_TURNS}::test_step[{model}-{n}]" for n in (1, 2) for model in ("small", "small, norms")
    ]
    steps.append(f"tests/gpu/{runner.IN_TURNS}::test_again[small]")
    first, second = runner.phases([*rest, *steps, *alone, *large], 8)
    assert [(workers.count, workers.share) for workers in first] == [(1, True), (2, False), (8, True)]
    assert [(workers.count, workers.share) for workers in second] == [(2, True)]
    in_order = lambda workers: [name for batch in workers.batches for name in batch]
    assert [in_order(workers) for workers in (first[0], first[2], second[0])] == [alone, rest, large]
    assert first[1].batches == [[steps[0], steps[2], steps[4]], [steps[1], steps[3]]]  # a worker for each model
    shared = [batch for workers in (first[0], first[2], second[0]) for batch in workers.batches]
    assert max(map(len, shared)) == runner.TESTS_AT_A_TIME
    assert (PATH.parent / runner.IN_TURNS).exists()
    for start in runner.ALONE:
        file, _, test = start.partition("::")
        assert f"def {test}" in (PATH.parent / file).read_text()


def test_only_what_passed_with_the_present_code_is_not_run_again(runner, tmp_path):
    path = tmp_path / "runs" / "kept.jsonl"
    kept = runner.Kept(path, "now")
    for test, outcome in (("a", "passed"), ("b", "failed"), ("c", "skipped")):
        kept.add(test, outcome, "why\nE  off by one" if outcome == "failed" else "")
    assert kept.failed == {"b": "E  off by one"}
    assert kept.ran == 3
    assert runner.Kept(path, "now").passed == {"a"}
    assert runner.Kept(path, "changed").passed == set()


def test_what_had_too_little_memory_is_tried_once_more(runner, tmp_path):
    kept = runner.Kept(tmp_path / "kept.jsonl", "now")
    kept.add("a", "failed", "CUDA out of memory.\nE  AssertionError")
    kept.add("b", "failed", "E  off by one")
    assert kept.short_of_memory == ["a"]
    assert kept.ran == 2
    kept.add("a", "passed", "")
    assert kept.failed == {"b": "E  off by one"}
    assert kept.ran == 2


@pytest.fixture
def pretended(runner, tmp_path, monkeypatch):
    """A run of two tests, of which these became what is said; its exit code."""

    def run(**outcomes):
        monkeypatch.setattr(sys, "argv", ["run.py", "--jobs", "2", "--kept", str(tmp_path / "kept.jsonl")])
        monkeypatch.setattr(runner, "collected", lambda only: ["a", "b"])
        monkeypatch.setattr(runner, "shared_gpu", nullcontext)
        ran = lambda beside_each_other, until, kept: [
            kept.add(name, outcomes.pop(name), "")
            for workers in beside_each_other for batch in workers.batches for name in batch if name in outcomes
        ]  # fmt: skip
        monkeypatch.setattr(runner, "run_all", ran)
        return runner.main()

    return run


def test_a_run_is_good_when_nothing_failed_and_nothing_is_left(pretended, capsys):
    assert pretended(a="passed", b="failed") == 1
    assert pretended(b="skipped") == 0
    assert pretended() == 1  # what is skipped is tried again, for instance on another GPU
    assert "0 passed or skipped, 0 failed, 1 did not run" in capsys.readouterr().out
    assert pretended(b="passed") == 0
    assert pretended() == 0


def test_tests_that_cannot_be_collected_end_the_run(runner, monkeypatch):
    answer = lambda code: lambda *_, **__: subprocess.CompletedProcess([], code, "gpu/test_x.py::test_y\n1 test", "")
    monkeypatch.setattr(subprocess, "run", answer(0))
    assert runner.collected("") == ["gpu/test_x.py::test_y"]
    monkeypatch.setattr(subprocess, "run", answer(2))
    with pytest.raises(SystemExit):
        runner.collected("")


def test_whatever_a_test_runs_is_in_the_hash(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "HERE", tmp_path / "tests" / "gpu")
    code = ["tilestack/ops.py", "tilestack/kernels/a.cu", "tilestack/kernels/a.cuh", "tilestack/kernels/a.cpp", "tilestack/kernels/a.h",
            "tilestack/tuning/tables/h200.json", "tests/conftest.py", "tests/gpu/test_a.py", "tests/gpu/run.py"]  # fmt: skip
    hashes = set()
    for text in ("", "changed"):
        for name in code:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {text}")
            hashes.add(runner.hash_of_code())
    assert len(hashes) == 2 * len(code)
    (tmp_path / "tilestack" / "notes.md").write_text("about it")
    assert runner.hash_of_code() in hashes


OUTCOMES = """
import pytest

@pytest.fixture
def unruly():
    yield
    raise RuntimeError("left behind")

def test_good(): pass
def test_wrong(): assert 1 == 2
def test_unruly(unruly): pass
def test_nowhere(): pytest.skip("no such GPU")
def test_shares_nothing():
    import os
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
def test_not_even_begun(no_such_fixture): pass
"""
SCRIPT = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run

if __name__ == "__main__":
    kept = run.Kept(Path(sys.argv[3]), "now")
    run.run_all([run.Workers(2, [[sys.argv[2]]], share=False)], time.time() + 600, kept)
    print(json.dumps([kept.ran, sorted(name.partition("::")[2] for name in kept.failed)]))
"""


def test_a_test_has_failed_wherever_it_did(tmp_path):
    """In its body, before it or after it."""
    tests, script = tmp_path / "test_outcomes.py", tmp_path / "script.py"
    tests.write_text(OUTCOMES)
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(PATH.parent), str(tests), str(tmp_path / "kept.jsonl")]
    shared = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, env=shared)
    assert json.loads(found.stdout.splitlines()[-1]) == [6, ["test_not_even_begun", "test_unruly", "test_wrong"]]
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [each["test"].partition("::")[2] for each in kept if each["outcome"] == "passed"] == [
        "test_good",
        "test_shares_nothing",
    ]
