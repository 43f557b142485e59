"""Attention's kernels under NVIDIA's compute-sanitizer: `python tests/gpu/sanitize.py`, which ends with 0 where nothing is found.

    memcheck     every backend of ours in every configuration, forward and backward: what is read or written beyond a tensor
    racecheck    those in Triton: threads that use shared memory without waiting for each other. Gluon's kernels hand shared
                 memory on by barriers in it and by TMA, which the tool does not follow

Every tensor has an allocation of its own, PyTorch's cache being off, so that nothing lies behind it. Kernels take ten to a
hundred times as long here: cases are small, and values are not looked at, which `tilestack verify` does.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilestack import ops
from tilestack.contract import Case, Operator, backend
from tilestack.contract.cases import Make
from tilestack.contract.operator import as_tuple
from tilestack.lab.explain import elements
from tilestack.lab.peers import our_backends

OPERATORS = ("attention", "flex_attention", "paged_attention")
RUNGS = ("triton_standard", "triton_blocked", "triton")
LARGEST = 320_000  # elements of a case
FOUND = 86  # the exit code of the tool where it found something: nobody else's
TOOLS: dict[str, list[str]] = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": [],
}  # PyTorch tries calls that fail
TOOLKIT = "/usr/local/cuda/bin"


class Call(NamedTuple):
    """An implementation in one configuration, its first where the name is empty, on a case."""

    operator: Operator
    backend: str
    config: str
    case: Case


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parse.add_argument("--tool", choices=[*TOOLS], help="one of them alone")
    parse.add_argument("--inside", choices=[*TOOLS], help="make the calls of a tool, which is already watching")
    asked = parse.parse_args()
    if asked.inside:
        return make_calls(asked.inside, torch.device("cuda"))
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT]))
    if program is None:
        print("there is no compute-sanitizer here; it comes with NVIDIA's CUDA toolkit", file=sys.stderr)
        return 2
    codes = {tool: watched(program, tool) for tool in ([asked.tool] if asked.tool else TOOLS)}
    for tool, code in codes.items():
        print(f"{tool}: {'nothing found' if code == 0 else 'something found' if code == FOUND else f'it failed with exit code {code}'}")  # fmt: skip
    return int(any(codes.values()))


def watched(program: str, tool: str) -> int:
    """Make the calls of a tool in a process that it watches."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), *TOOLS[tool]]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*command, sys.executable, str(Path(__file__)), "--inside", tool], env=environment).returncode


def calls_of(tool: str) -> Iterator[Call]:
    for operator in map(ops.operator_named, OPERATORS):
        small = [case for case in operator.cases if case.kind != "bench" and 0 < elements(case) <= LARGEST]
        for name in our_backends(operator):
            if tool == "memcheck" or name in RUNGS:
                for config in operator.implementations[name].configs or [""]:
                    yield from (Call(operator, name, config, case) for case in small)


def make_calls(tool: str, device: torch.device) -> int:
    """Make every call that its implementation takes; 1 where one of them takes none, of which nothing would be known."""
    made: Counter[tuple[str, str]] = Counter()
    for call in calls_of(tool):
        made[call.operator.name, call.backend] += make_call(call, device)
    for (operator, name), count in made.items():
        print(f"{operator} on {name}: {count} calls", flush=True)
    return int(not all(made.values()))


def make_call(call: Call, device: torch.device) -> bool:
    """Forward, and backward where there is one; False where the implementation refuses the arguments."""
    operator, implementation = call.operator, call.operator.implementations[call.backend]
    # Drawn on the host: then nearly all that runs on the GPU is ours.
    given = operator.bind(**call.case.build(Make(torch.bfloat16)))
    arguments = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    if implementation.refuses(arguments, device):
        return False
    backward = not implementation.refuses(arguments, device, with_gradient=True)
    leaves = [value.requires_grad_() for value in arguments.values() if backward and is_float(value)]
    with backend(**{operator.name: f"{call.backend}:{call.config}" if call.config else call.backend}):
        outputs = [out for out in as_tuple(operator(*arguments.values())) if out.requires_grad]
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
