"""Running ahead, in several processes, what is then timed in one: that finds everything compiled, in the caches on disk.

Most of a benchmark's time goes into compilers, ours and the peers', and these use one core each. Nothing is timed here, so
nothing is disturbed; and what fails here, be it that so many have too little memory, is tried again where it is timed.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tilestack.lab.shared_gpu import shared_gpu
from tilestack.lab.workers import load_files

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
    until = None if seconds is None else time.monotonic() + seconds
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), start_worker, (files,))
    try:
        with shared_gpu():
            begun = [pool.submit(call_and_tidy, function, arguments) for arguments in given]
            wait(begun, None if until is None else max(0.0, until - time.monotonic()))
            pool.shutdown(cancel_futures=True)
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [None if each.cancelled() or each.exception() is not None else each.result() for each in begun]


def start_worker(files: Sequence[Path]) -> None:
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
