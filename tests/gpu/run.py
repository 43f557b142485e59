"""All tests of this folder in several processes on one GPU, in parts: `python tests/gpu/run.py --jobs 16 --budget 300`.

A worker runs a few tests at a time and takes the next few when it is done, so that no process starts twice. What passed is
kept in a file, with a hash of all our code, and is not run again until something changes: a run may be cut at any time, and the next goes on.

    alone     kernels that hold the whole GPU and wait for each other would wait for ever beside others of their kind, and engines
              that take all the memory there is leave none to each other: one worker has these
    the rest  as many workers as there are jobs, beside that one
    large     float64 definitions of what `bench` measures take tens of gigabytes: two workers, when the others are done,
              and one for those that had too little memory even then

Workers share the GPU by NVIDIA's MPS where it is installed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # where nothing is installed, this script's folder is all that Python looks into

from tilestack.lab.proof.shared_gpu import shared_gpu  # noqa: E402

ALONE = (  # tests whose names begin so, in this order: the last build for minutes
    "test_early_chain.py",
    "test_engine.py::test_memory_is_found",
    "test_engine.py::test_kernels_compiled_ahead",
    "test_decode_step.py",
)
LARGE = "-bench]"
TESTS_AT_A_TIME = 5


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parse.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for tests that share a GPU well")
    parse.add_argument("--budget", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parse.add_argument("--kept", type=Path, default=ROOT / "runs" / "gpu-tests.jsonl", help="what became of each test")
    parse.add_argument("-k", dest="only", default="", help="only tests whose names match, as for pytest")
    asked = parse.parse_args()
    kept = Kept(asked.kept, hash_of_code())
    names = [name for name in collected(asked.only) if name not in kept.passed]
    print(f"{len(names)} tests to run, {len(kept.passed)} passed before", flush=True)
    until = time.time() + asked.budget
    with shared_gpu():
        for beside_each_other in phases(names, asked.jobs):
            run_all(beside_each_other, until, kept)
        run_all([(1, [[name] for name in kept.short_of_memory])], until, kept)
    for name in sorted(kept.failed):
        print(f"FAILED {name}: {kept.failed[name]}")
    left = len(names) - kept.ran
    print(
        f"{kept.ran - len(kept.failed)} passed or skipped, {len(kept.failed)} failed, {left} did not run; see {asked.kept}"
    )
    return 1 if kept.failed or left else 0


class Kept:
    """What became of each test, a line for each in a file; those that passed with the present code need not run again."""

    def __init__(self, path: Path, code: str):
        self.path, self.code, self.ran = path, code, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.passed = {each["test"] for each in before if each["code"] == code and each["outcome"] == "passed"}
        self.failed: dict[str, str] = {}
        self.short_of_memory: list[str] = []

    def add(self, test: str, outcome: str, why: str) -> None:
        self.ran += test not in self.failed
        self.failed.pop(test, None)
        if outcome == "failed":
            self.failed[test] = why.strip().splitlines()[-1][:300] if why.strip() else ""
            self.short_of_memory += [test] * ("out of memory" in why)
        with self.path.open("a") as file:
            file.write(json.dumps(dict(test=test, outcome=outcome, why=why[-4000:], code=self.code)) + "\n")


def hash_of_code() -> str:
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "tilestack").rglob("*"), HERE.parent / "conftest.py", *HERE.glob("*.py")]):
        if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h", ".json") and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def collected(only: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", str(HERE), "-k", only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 5):
        raise SystemExit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def phases(names: list[str], jobs: int) -> list[list[tuple[int, list[list[str]]]]]:
    """What runs at the same time: for each kind of test the workers, and what they share in turn; tests of one file stay
    together."""
    begins = lambda name, start: name.removeprefix("tests/gpu/").startswith(start)
    alone = [name for start in ALONE for name in names if begins(name, start)]
    large = [name for name in names if name.endswith(LARGE)]
    rest = [name for name in names if name not in alone and name not in large]
    cut = lambda those, size: [those[start : start + size] for start in range(0, len(those), size)]
    return [[(1, cut(alone, TESTS_AT_A_TIME)), (jobs, cut(rest, TESTS_AT_A_TIME))], [(2, cut(large, 1))]]


def run_all(shared: list[tuple[int, list[list[str]]]], until: float, kept: Kept) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    queues, workers = [context.Queue() for _ in shared], []
    for waiting, (count, batches) in zip(queues, shared, strict=True):
        for batch in batches:
            waiting.put(batch)
        for _ in range(min(count, len(batches))):
            worker = context.Process(target=work, args=(waiting, results, until), daemon=True)
            worker.start()
            workers.append(worker)
    while any(worker.is_alive() for worker in workers) or not results.empty():
        try:
            kept.add(*results.get(timeout=1))
        except Empty:
            continue
    for worker in workers:
        if worker.exitcode:
            print(f"a worker ended with exit code {worker.exitcode}; what it was at did not run")


def work(waiting: Any, results: Any, until: float) -> None:
    import pytest

    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    class Report:
        """Sends on what became of each test."""

        def __init__(self) -> None:
            self.outcomes: dict[str, tuple[str, str]] = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            before = self.outcomes.get(report.nodeid, ("passed", ""))
            if before[0] != "failed" and report.outcome != "passed":
                self.outcomes[report.nodeid] = report.outcome, str(report.longrepr)
            else:
                self.outcomes[report.nodeid] = before
            if report.when == "teardown":
                results.put((report.nodeid, *self.outcomes.pop(report.nodeid)))

    while time.time() < until:
        try:
            batch = waiting.get(timeout=1)
        except Empty:
            return
        pytest.main(["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short", *batch], plugins=[Report()])


if __name__ == "__main__":
    sys.exit(main())
