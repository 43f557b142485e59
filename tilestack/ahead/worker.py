"""The process that compiles: `python -m tilestack.ahead.worker JOBS MODULE`, which pool.py starts.

It imports MODULE, and with it what kernels need, once. Then it reads a line of JSON for each kernel, forks for it, at most
JOBS at a time, and answers a line of JSON when one has ended. A fork that dies takes no other with it. Nobody needs a GPU
here. When its input ends, as it does when whoever asked has ended in any way, or when nothing was asked for a while, it
ends, with all that it started.
"""

import collections
import contextlib
import importlib
import json
import os
import select
import signal
import sys
from typing import Any, TextIO

from tilestack.ahead.listing import forget_hashes

PATIENCE = 60.0  # seconds without a question
ERROR_LENGTH = 400


class Target:
    """Triton's driver where kernels are compiled for a GPU and none is launched."""

    def __init__(self, backend: str, arch: int, warp_size: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # Triton keeps what it compiled by device


def kernel_of(asked: dict[str, Any]) -> Any:
    """The kernel that is asked for, with its GPU as the one that Triton compiles for."""
    from triton.runtime import driver

    driver.set_active(Target(*asked["target"]))
    kernel: Any = importlib.import_module(asked["module"])
    for part in asked["name"].split("."):
        kernel = getattr(kernel, part)
    return kernel


def hash_triton() -> None:
    """Find out, before the forks that would each do so, what Triton's cache goes by: a hash of Triton itself."""
    from triton.runtime.cache import triton_key

    triton_key()


def hash_kernel(asked: dict[str, Any]) -> None:
    """The same for the kernel's source and for the assembler."""
    from triton.compiler import make_backend
    from triton.runtime import driver

    kernel = kernel_of(asked)
    try:
        assert kernel.cache_key
    except Exception:
        forget_hashes(kernel)
        raise
    make_backend(driver.active.get_current_target()).hash()


def in_words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:ERROR_LENGTH]


def begin(asked: dict[str, Any]) -> tuple[int, int]:
    """Compile in a fork: its number, and where it writes what went wrong before it ends."""
    reading, writing = os.pipe()
    if (child := os.fork()) != 0:
        os.close(writing)
        return child, reading
    failed = 1
    try:
        kernel_of(asked).preload(asked["description"])  # into Triton's cache on disk
        failed = 0
    except BaseException as problem:
        os.write(writing, in_words(problem).encode())
    finally:
        os._exit(failed)


def end(child: int, reading: int) -> str:
    """What went wrong in a fork that has ended; empty where all is well."""
    with os.fdopen(reading, "rb") as told:
        problem = told.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return problem or (f"the compiler ended with {code}" if code else "")


def serve(jobs: int, questions: int, answers: TextIO) -> None:
    """Compile what is asked for until nobody asks any more."""
    waiting: collections.deque[dict[str, Any]] = collections.deque()
    running: dict[int, tuple[int, int]] = {}  # by where they write: the fork, and the number of its kernel
    unread = b""
    answer = lambda number, problem: print(json.dumps(dict(number=number, problem=problem)), file=answers, flush=True)
    while True:
        while waiting and len(running) < jobs:
            asked = waiting.popleft()
            child, reading = begin(asked)
            running[reading] = child, asked["number"]
        ready, _, _ = select.select([questions, *running], [], [], None if running else PATIENCE)
        for reading in set(ready) & running.keys():
            child, number = running.pop(reading)
            answer(number, end(child, reading))
        if questions in ready:
            more = os.read(questions, 1 << 16)
            if not more:
                return
            *lines, unread = (unread + more).split(b"\n")
            for line in map(json.loads, lines):
                try:
                    hash_kernel(line)
                    waiting.append(line)
                except Exception as problem:
                    answer(line["number"], in_words(problem))
        elif not ready:
            return


def main() -> None:
    jobs, module = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    try:
        importlib.import_module(module)
        with contextlib.suppress(ImportError):  # of another Triton
            hash_triton()
        serve(jobs, 0, answers)
    finally:
        if os.getpgrp() == os.getpid():  # assemblers are in it too
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
