"""All tests of this folder in several processes on one GPU, in parts: `python tests/gpu/run.py --jobs 16 --budget 300`.

A worker runs a few tests at a time and takes the next few when it is done, so that no process starts twice. What passed is
kept in a file, with a hash of all our code, and is not run again until something changes: a run may be cut at any time, and the next goes on.

    alone     kernels that hold the whole GPU and wait for each other would wait for ever beside others of their kind, and engines
              that take all the memory there is leave none to each other: one worker has these
    in turns  a decode step is such a kernel too, and takes minutes to compile: a worker for each model, without MPS, so that
              each has the whole GPU while it has any of it
    the rest  as many workers as there are jobs, beside those
    large     float64 definitions of what `bench` measures take tens of gigabytes: two workers, when the others are done,
              and one for those that had too little memory even then

Other workers share the GPU by NVIDIA's MPS where it is installed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # where nothing is installed, this script's folder is all that Python looks into

from tilestack.lab.proof.shared_gpu import PLACES, shared_gpu  # noqa: E402

ALONE = (  # tests whose names begin so, in this order
    "test_early_chain.py",
    "test_engine.py::test_memory_is_found",
    "test_engine.py::test_kernels_compiled_ahead",
)
IN_TURNS = "test_decode_step.py"
LARGE = "-bench]"
TESTS_AT_A_TIME = 5
TOLD_EVERY = 20  # seconds


@dataclass(frozen=True)
class Workers:
    """So many processes, and the tests that each takes at a time until all are taken."""

    count: int
    batches: Sequence[Sequence[str]]
    share: bool = True  # the GPU, by MPS


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
        run_all([Workers(1, [[name] for name in kept.short_of_memory])], until, kept)
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


def phases(names: list[str], jobs: int) -> list[list[Workers]]:
    """What runs at the same time; tests of one file stay together."""
    begins = lambda name, start: name.removeprefix("tests/gpu/").startswith(start)
    alone = [name for start in ALONE for name in names if begins(name, start)]
    in_turns: dict[str, list[str]] = {}
    for name in names:
        if begins(name, IN_TURNS):
            in_turns.setdefault(model_of(name), []).append(name)
    large = [name for name in names if name.endswith(LARGE)]
    apart = {*alone, *large}
    rest = [name for name in names if name not in apart and not begins(name, IN_TURNS)]
    cut = lambda those, size: [those[start : start + size] for start in range(0, len(those), size)]
    first = [
        Workers(1, cut(alone, TESTS_AT_A_TIME)),
        Workers(len(in_turns), list(in_turns.values()), share=False),
        Workers(jobs, cut(rest, TESTS_AT_A_TIME)),
    ]
    return [first, [Workers(2, cut(large, 1))]]


def model_of(name: str) -> str:
    """The first parameter of a test, by which its file makes a model."""
    found = re.search(r"\[([^\]-]*)", name)
    return found[1] if found else ""


def run_all(beside_each_other: Sequence[Workers], until: float, kept: Kept) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    queues, processes = [context.Queue() for _ in beside_each_other], []
    for waiting, workers in zip(queues, beside_each_other, strict=True):
        for batch in workers.batches:
            waiting.put(batch)
        for _ in range(min(workers.count, len(workers.batches))):
            process = context.Process(target=work, args=(waiting, results, until, workers.share), daemon=True)
            process.start()
            processes.append(process)
    told = time.time()
    while any(process.is_alive() for process in processes) or not results.empty():
        if time.time() > told + TOLD_EVERY:
            told = time.time()
            print(f"{kept.ran} ran, {len(kept.failed)} failed so far", flush=True)
        try:
            kept.add(*results.get(timeout=1))
        except Empty:
            continue
    for process in processes:
        if process.exitcode:
            print(f"a worker ended with exit code {process.exitcode}; what it was at did not run")


def work(waiting: Any, results: Any, until: float, share: bool) -> None:
    import pytest

    if not share:
        for place in PLACES:
            os.environ.pop(place, None)
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
