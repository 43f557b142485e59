"""Proving in several processes at once: a task is an operator in one dtype, and a worker proves some of its cases at a time.

On a GPU most of the time goes into compiling kernels and evaluating definitions, so workers share one well. A worker that
dies, or whose GPU context a kernel has broken, takes no other task with it: its own is refuted, and another takes its place.
"""

import faulthandler
import importlib.util
import math
import multiprocessing
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from tilestack.contract.cases import Make
from tilestack.contract.operator import Operator
from tilestack.contract.registry import operator_named
from tilestack.lab.bench.peers import our_backends
from tilestack.lab.labels import dtype_name
from tilestack.lab.proof.child_process import start_without_ctrl_c
from tilestack.lab.proof.claims import Claim, Proof, claims, default_dtypes
from tilestack.lab.proof.shared_gpu import shared_gpu
from tilestack.lab.proof.verify import prove

BROKEN_CONTEXT = "CUDA error"  # after which every later call on the GPU fails in the same process
ANY = "any"  # direction: that in which a process died is not known
CLAIMS_IN_A_PART = 40  # after which another part is made of the cases that follow


@dataclass(frozen=True)
class Task:
    """All claims of an operator in one dtype, on one backend or all of them."""

    operator: str
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None
    kinds: tuple[str, ...] = ("check",)
    every_variant: bool = True
    case_names: frozenset[str] | None = None  # all cases where it is None

    def claims(self) -> Iterator[Claim]:
        only = {self.operator: self.backend} if self.backend else None
        return claims(
            [operator_named(self.operator)],
            self.device,
            only=only,
            dtypes=[self.dtype],
            kinds=self.kinds,
            every_variant=self.every_variant,
            case_names=self.case_names,
        )

    def is_taken(self) -> bool:
        """Whether there is a case whose arguments its backend takes in this dtype; without one there is nothing to prove."""
        operator = operator_named(self.operator)
        implementations = [i for name, i in operator.implementations.items() if self.backend in (None, name)]
        for case in operator.cases:
            given = operator.given_tensors(operator.bind(**case.build(Make(self.dtype, "meta"))))
            for implementation in implementations:
                if all(t.dtype in (implementation.accepted(name, t) or (t.dtype,)) for name, t in given.items()):
                    return True
        return False

    def proofs(self) -> list[Proof]:
        return [prove(claim) for claim in self.claims()]

    def refuted(self, message: str) -> list[Proof]:
        """Of every backend that it may have been the fault of, whatever was claimed: none of them is proved by what came
        before, and each is tried by itself by `verify --stale`."""
        dtype = dtype_name(self.dtype)
        taken = [task.backend for task in each_backend([self]) if task.is_taken()]
        blamed = [self.backend] if self.backend else taken or ["any"]
        cases = ", ".join(sorted(self.case_names or ["any"]))
        return [Proof(self.operator, name, cases, "any", dtype, ANY, False, message=message) for name in blamed if name]


def tasks_for(
    operators: Iterable[Operator],
    device: torch.device,
    *,
    only: dict[str, str],
    dtypes: Sequence[torch.dtype] | None,
    kinds: tuple[str, ...],
    every_variant: bool,
) -> list[Task]:
    return [
        Task(operator.name, dtype, device, only.get(operator.name), kinds, every_variant)
        for operator in operators
        for dtype in dtypes or default_dtypes(device)
    ]


def each_backend(tasks: Iterable[Task]) -> list[Task]:
    """Tasks as small as they can be: one for each backend of ours."""
    return [
        replace(task, backend=backend)
        for task in tasks
        for backend in our_backends(operator_named(task.operator))
        if task.backend in (None, backend)
    ]


def parts_of(task: Task) -> list[Task]:
    """The task as several, each with some of its cases."""
    parts: list[list[str]] = []
    size = CLAIMS_IN_A_PART
    for name, claims_of_case in Counter(claim.case.name for claim in task.claims()).items():
        if size >= CLAIMS_IN_A_PART:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += claims_of_case
    return [replace(task, case_names=frozenset(names)) for names in parts] if len(parts) > 1 else [task]


def prove_tasks(
    tasks: Sequence[Task], jobs: int = 1, files: Sequence[Path] = (), budget: float = math.inf
) -> Iterator[tuple[Task, list[Proof]]]:
    """Each task with its proofs, as they are done: in this process, or in as many others; `files` are run there first.

    None is begun once so many seconds are over; those that were never begun are not among what is found. Where several
    processes work, they share the parts of a task, the longest tasks first, so that all end together; or, where not all may
    be begun, the shortest, so that the most are proved.
    """
    ends = time.monotonic() + budget
    if jobs == 1:
        yield from ((task, task.proofs()) for task in takewhile(lambda _: time.monotonic() < ends, tasks))
        return
    parts = {task: parts_of(task) for task in tasks}
    in_order = sorted(tasks, key=lambda task: len(parts[task]), reverse=math.isinf(budget))
    whole = {part: task for task in in_order for part in parts[task]}
    may_begin = lambda part: part != parts[whole[part]][0] or time.monotonic() < ends
    found: dict[Task, list[Proof]] = {}
    with shared_gpu() if any(task.device.type == "cuda" for task in tasks) else nullcontext():
        for part, proofs in prove_apart(whole, jobs, files, may_begin):
            found[part] = proofs
            mine = parts[whole[part]]
            if all(each in found for each in mine):
                yield whole[part], [proof for each in mine for proof in found.pop(each)]


def prove_apart(
    tasks: Iterable[Task], jobs: int, files: Sequence[Path], may_begin: Callable[[Task], bool]
) -> Iterator[tuple[Task, list[Proof]]]:
    """Tasks and their proofs from so many other processes, begun in turn as long as the next one may be."""
    waiting = deque(tasks)
    busy: dict[Connection, tuple[BaseProcess, Task]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    try:
        begins = lambda: waiting and may_begin(waiting[0])
        while begins() or busy:
            while begins() and len(busy) < jobs:
                connection, process = idle.pop() if idle else start_worker(files)
                task = waiting.popleft()
                connection.send(task)
                busy[connection] = process, task
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                process, task = busy.pop(connection)
                try:
                    proofs = connection.recv()
                except EOFError:
                    process.join()
                    yield task, task.refuted(f"the process that proved it died, exit code {process.exitcode}")
                    continue
                if is_broken(proofs):
                    connection.close()
                else:
                    idle.append((connection, process))
                yield task, proofs
    finally:
        for process in [process for process, _ in busy.values()] + [process for _, process in idle]:
            process.kill()


def start_worker(files: Sequence[Path]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prove_as_told, args=(theirs, files), daemon=True)
    start_without_ctrl_c(process)
    theirs.close()
    return ours, process


def prove_as_told(connection: Connection, files: Sequence[Path]) -> None:
    faulthandler.enable()  # a crash in a compiler or a driver says where it was
    torch.set_num_threads(1)
    load_files(files)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        proofs = task.proofs()
        connection.send(proofs)
        if is_broken(proofs):
            return


def is_broken(proofs: Iterable[Proof]) -> bool:
    return any(proof.ok is False and BROKEN_CONTEXT in proof.message for proof in proofs)


def load_files(paths: Iterable[Path] | None) -> None:
    """Run Python files that register operators and backends from outside."""
    for path in paths or ():
        load_file(path)


def load_file(path: Path) -> ModuleType:
    """Run one such file; an error in it is told with its line."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} to load")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{path}:{line_of_error(problem, path)}: {type(problem).__name__}: {problem}") from problem
    return module


def line_of_error(problem: BaseException, path: Path) -> int:
    """The line of a file that an error came from, or in which it could not be read."""
    if isinstance(problem, SyntaxError):
        return problem.lineno or 1
    frames = traceback.extract_tb(problem.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    return next((line for line in reversed(lines) if line), 1)
