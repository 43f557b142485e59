"""How the tests of tests/gpu are shared among processes, and what is remembered of them."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "gpu" / "run.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("gpu_run", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_that_hold_the_gpu_have_one_process_and_large_proofs_two(runner):
    alone = [f"tests/gpu/{file}::test_{number}" for file in runner.ALONE for number in range(4)]
    large = [f"tests/gpu/test_operators.py::test_every_implementation_is_proved[{name}-bench]" for name in "abc"]
    rest = [f"tests/gpu/test_operators.py::test_other[{number}]" for number in range(11)]
    first, second = runner.phases([*rest, *alone, *large], 8)
    assert [workers for workers, _ in first] == [1, 8]
    assert [workers for workers, _ in second] == [2]
    assert [[name for batch in batches for name in batch] for _, batches in first + second] == [alone, rest, large]
    assert max(len(batch) for _, batches in first + second for batch in batches) == runner.TESTS_AT_A_TIME
    assert all((PATH.parent / file).exists() for file in runner.ALONE)


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
