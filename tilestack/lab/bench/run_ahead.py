"""Running ahead, in several processes, what is then timed in one: that finds everything compiled, in the caches on disk.

Most of a benchmark's time goes into compilers, ours and the peers', and these use one core each. Nothing is timed here, so
nothing is disturbed; and what fails here, be it that so many have too little memory, is tried again where it is timed.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tilestack.lab.proof.shared_gpu import shared_gpu
from tilestack.lab.proof.workers import load_files

ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # each: the processes share the cores


def run_ahead(
    function: Callable[..., Any],
    given: Iterable[tuple],
    jobs: int,
    seconds: float | None = None,
    files: Sequence[Path] = (),
) -> list[Any]:
    """What a function returns for each of the arguments given, called in as many processes; None where it fails, and for
    what is not begun, which nothing is after so many seconds. `files` are run first in each process."""
    with single_threads(), shared_gpu():
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), start_ahead_worker, (files,))
        try:
            begun = [pool.submit(call_and_tidy, function, arguments) for arguments in given]
            wait(begun, seconds)
        finally:
            pool.shutdown(cancel_futures=True)
    return [None if each.cancelled() or each.exception() is not None else each.result() for each in begun]


@contextmanager
def single_threads() -> Iterator[None]:
    """For processes that are started inside: one thread each."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def start_ahead_worker(files: Sequence[Path]) -> None:
    torch.set_num_threads(1)
    load_files(files)


def call_and_tidy(function: Callable[..., Any], arguments: tuple) -> Any:
    """What a function returns; the memory it took is there for the others."""
    try:
        return function(*arguments)
    finally:
        torch.compiler.reset()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
