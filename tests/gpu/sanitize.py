"""Attention's kernels under NVIDIA's compute-sanitizer: `python tests/gpu/sanitize.py`, which ends with 0 where nothing is found.

    memcheck     every backend of ours in every configuration, forward and backward: what is read or written beyond a tensor
    racecheck    those in Triton: threads that use shared memory without waiting for each other. Gluon's kernels hand shared
                 memory on by barriers in it and by TMA, which the tool does not follow; they have test_attention_delays.py

Every tensor has an allocation of its own, PyTorch's cache being off, so that nothing lies behind it. Kernels take ten to a
hundred times as long here: cases are small, and values are not looked at, which `tilestack verify` does.

Most of the time goes into compiling, on the host, so that calls are shared among several processes on one GPU, each of which
takes the next when it is done. What was found clean is kept in a file, with a hash of all our code, and not done again until
something changes: with `--budget` a run ends early, and the next goes on.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from run import ROOT, hash_of_code

from tilestack import ops
from tilestack.contract import Case, Operator, backend
from tilestack.contract.cases import Make
from tilestack.contract.operator import as_tuple
from tilestack.lab.bench.peers import our_backends
from tilestack.lab.compile.explain import elements

OPERATORS = (
    "attention", "flex_attention", "paged_attention", "paged_attention_codes", "attention_int8", "attention_fp8", "kv_write",
    "qkv_rope_write",
)  # fmt: skip
LARGEST = 320_000  # elements of a case
FOUND = 86  # the exit code of the tool where it found something: nobody else's
OPTIONS: dict[str, list[str]] = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": [],
}  # PyTorch tries calls that fail
# What ends a report. Without it the tool was not watching: one that gives up connecting lets the program run alone.
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.M)
TOOLKIT = "/usr/local/cuda/bin"
FIRST_PORT, PORTS = 49152, 16  # by which the tool meets the program it watches; for each process its own
GRACE = 60  # seconds after the budget in which a call that was begun may end
TOLD_LINES = 40  # of a report in which something was found


class Call(NamedTuple):
    """An implementation in one configuration, its first where the name is empty, on a case."""

    operator: Operator
    backend: str
    config: str
    case: Case
    backward: bool = True  # too, where there is one

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.operator.name, self.backend, self.config, self.case.name)))


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parse.add_argument("--tool", choices=[*OPTIONS], help="one of them alone")
    parse.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that share the GPU")
    parse.add_argument(
        "--budget", type=float, default=float("inf"), help="begin nothing after so many seconds, of each tool"
    )
    parse.add_argument("--kept", type=Path, default=ROOT / "runs" / "sanitized.jsonl", help="what was found clean")
    parse.add_argument("--inside", nargs=4, metavar=("TOOL", "FOLDER", "WORKER", "UNTIL"), help="make calls, as one of several processes that are watched")  # fmt: skip
    asked = parse.parse_args()
    if asked.inside:
        tool, folder, worker, until = asked.inside
        make_calls(tool, torch.device("cuda"), Path(folder), int(worker), float(until))
        return 0
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT]))
    if program is None:
        print("there is no compute-sanitizer here; it comes with NVIDIA's CUDA toolkit", file=sys.stderr)
        return 2
    kept = Kept(asked.kept, hash_of_code())
    clean = [
        watched(program, tool, asked.jobs, asked.budget, kept) for tool in ([asked.tool] if asked.tool else OPTIONS)
    ]
    return int(not all(clean))


class Kept:
    """The calls that a tool found clean with the present code, and whether the implementation took them; a line for each."""

    def __init__(self, path: Path, code: str):
        self.path, self.code = path, code
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.made = {(each["tool"], each["call"]): each["made"] for each in lines if each["code"] == code}

    def add(self, tool: str, call: str, made: bool) -> None:
        self.made[tool, call] = made
        with self.path.open("a") as file:
            file.write(json.dumps(dict(tool=tool, call=call, made=made, code=self.code)) + "\n")


def watched(program: str, tool: str, jobs: int, budget: float, kept: Kept) -> bool:
    """Make the calls of a tool in processes that it watches; whether all were made and nothing was found."""
    calls = list(calls_of(tool))
    left = [number for number, call in enumerate(calls) if (tool, call.name) not in kept.made]
    until, troubles = time.time() + budget, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "left.json").write_text(json.dumps(left))
        workers = [started(program, tool, folder, worker, until) for worker in range(min(jobs, len(left)))]
        for worker, process in enumerate(workers):
            try:
                process.wait(None if budget == float("inf") else max(until + GRACE - time.time(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            report = (folder / f"{worker}.log").read_text(errors="replace")
            if trouble := trouble_of(process.returncode, report):
                troubles.append(f"{tool}, process {worker}: {trouble}\n{told_of(report)}")
                continue
            for done in (folder / f"{worker}.done").read_text().splitlines():
                number, made = json.loads(done)
                kept.add(tool, calls[number].name, made)
    clean = [call for call in calls if (tool, call.name) in kept.made]
    counted = Counter((call.operator.name, call.backend) for call in clean if kept.made[tool, call.name])
    for (operator, name), count in counted.items():
        print(f"{operator} on {name}: {count} calls")
    unseen = (
        {(call.operator.name, call.backend) for call in calls} - set(counted) if len(clean) == len(calls) else set()
    )
    troubles += [
        f"{tool}: {operator} on {name} took no call, so nothing is known of it" for operator, name in sorted(unseen)
    ]
    for trouble in troubles:
        print(trouble)
    rest = f"; {len(calls) - len(clean)} are left, for the next run" if len(clean) < len(calls) else ""
    print(f"{tool}: {'nothing found' if not troubles else 'not clean'}, {len(clean)} calls{rest}", flush=True)
    return not troubles and len(clean) == len(calls)


def started(program: str, tool: str, folder: Path, worker: int, until: float) -> subprocess.Popen:
    """A process that the tool watches, which waits for it however long Python takes to come to its first kernel."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--launch-timeout", "0", *OPTIONS[tool]]
    if "--base-port" in subprocess.run([program, "--help"], capture_output=True, text=True).stdout:
        command += ["--base-port", str(FIRST_PORT + PORTS * worker)]
    inside = [sys.executable, str(Path(__file__)), "--inside", tool, str(folder), str(worker), str(until)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / f"{worker}.log").open("w") as log:
        return subprocess.Popen([*command, *inside], env=environment, stdout=log, stderr=subprocess.STDOUT)


def trouble_of(code: int, report: str) -> str:
    """What is wrong with a process and what the tool said of it; empty where it watched to the end and found nothing."""
    summary = SUMMARY.search(report)
    if "Device not supported" in report:
        return "the tool does not support this GPU, or not on this kind of machine"
    if code == FOUND or (summary and int(summary[1])):
        return "something found"
    if code:
        return f"it failed with exit code {code}"
    return "" if summary else "the tool was not watching: its report has no summary"


def told_of(report: str) -> str:
    lines = report.splitlines()
    return "\n".join(["…"] * (len(lines) > TOLD_LINES) + lines[-TOLD_LINES:])


def calls_of(tool: str) -> Iterator[Call]:
    """All small cases in the first configuration. The others differ in the forward alone, and in how it is cut into tiles:
    for them there is one case of each size of head and rule, of those that are for GPUs."""
    for operator in map(ops.operator_named, OPERATORS):
        small = [case for case in operator.cases if case.kind != "bench" and 0 < elements(case) <= LARGEST]
        telling = {heads_and_rule(case): case for case in small if case.kind == "gpu"}
        for name in our_backends(operator):
            if tool == "memcheck" or name.startswith("triton"):
                first, *others = operator.implementations[name].configs or [""]
                yield from (Call(operator, name, first, case) for case in small)
                yield from (Call(operator, name, each, case, False) for each in others for case in telling.values())


def heads_and_rule(case: Case) -> tuple[str, ...]:
    """Head sizes and what follows them in a case's name, after batch, lengths and heads."""
    return tuple(case.name.split("x")[5:])


def make_calls(tool: str, device: torch.device, folder: Path, worker: int, until: float) -> None:
    """Make the calls that are left and nobody else has begun, and note for each whether the implementation took it."""
    left = set(json.loads((folder / "left.json").read_text()))
    done = folder / f"{worker}.done"
    done.touch()
    for number, call in enumerate(calls_of(tool)):
        if number in left and time.time() < until and claimed(folder / f"{number}.begun"):
            made = make_call(call, device)
            with done.open("a") as file:
                file.write(json.dumps([number, made]) + "\n")


def claimed(path: Path) -> bool:
    """Whether this process is the first to come to a call."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def make_call(call: Call, device: torch.device) -> bool:
    """Forward, and backward where there is one; False where the implementation refuses the arguments."""
    operator, implementation = call.operator, call.operator.implementations[call.backend]
    # Drawn on the host: then nearly all that runs on the GPU is ours.
    given = operator.bind(**call.case.build(Make(torch.bfloat16)))
    arguments = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    if implementation.refuses(arguments, device):
        return False
    backward = call.backward and not implementation.refuses(arguments, device, with_gradient=True)
    leaves = [value.requires_grad_() for value in arguments.values() if backward and is_float(value)]
    with backend(**{operator.name: f"{call.backend}:{call.config}" if call.config else call.backend}):
        outputs = [out for out in as_tuple(operator(*arguments.values())) if out is not None and out.requires_grad]
        if outputs:
            arriving = [torch.ones(out.shape, dtype=out.dtype).to(device) for out in outputs]
            torch.autograd.grad(outputs, leaves, arriving, allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return True


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


if __name__ == "__main__":
    sys.exit(main())
