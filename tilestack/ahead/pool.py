"""Compiling what calls are going to launch, in as many processes as there are cores.

The processes are forks of one that is started for it (worker.py): not of this one, whose GPU no fork can use, and without
importing a user's script again, as multiprocessing would. It lives until a minute after the last question.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tilestack.ahead.listing import Listing, Wanted
from tilestack.contract.backends import interpreting

log = logging.getLogger(__name__)

JOBS_VARIABLE = "TILESTACK_COMPILE_JOBS"  # processes; 1: kernels are compiled as they are launched
MOST_JOBS = 32
FEW = 4  # kernels that are compiled sooner than a process is started for them
SAMPLES = 16  # calls after which, if nothing is to be compiled for them, no more are listed

Report = Callable[[int, int], None]


def compile_ahead(calls: Iterable[Callable[[], Any]], report: Report | None = None) -> int:
    """Compile, many at once, the kernels that these calls will launch, and answer how many they were.

    The calls are made once with their launches passed over, so what they compute then is worthless; where the first of
    them need nothing, the rest are not looked at. `report` is told how many kernels are done, and of how many; without it a
    terminal shows a bar.
    """
    jobs = jobs_allowed()
    if jobs < 2 or not possible():
        return 0
    missing = list_missing(calls, lambda so_far: so_far == FEW and start(jobs))
    if len(missing) < FEW:
        return len(missing)
    log.info("compiling %d kernels in %d processes", len(missing), min(jobs, len(missing)))
    with bar(len(missing)) if report is None else contextlib.nullcontext(report) as told:
        compile_all(missing, jobs, told)
    return len(missing)


def jobs_allowed() -> int:
    """Processes to compile in: what the environment says, or the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    written = os.environ.get(JOBS_VARIABLE, "")
    if written and not written.isdecimal():
        raise ValueError(f"{JOBS_VARIABLE} is a number of processes, not {written!r}")
    return int(written) if written else min(cores, MOST_JOBS)


def possible() -> bool:
    """Whether this Triton and this system have what it takes."""
    try:
        from triton import JITFunction, knobs

        known = hasattr(JITFunction, "preload") and hasattr(JITFunction, "warmup")
        return known and hasattr(knobs.runtime, "jit_cache_hook") and hasattr(os, "fork") and not interpreting()
    except ImportError:
        return False


def list_missing(calls: Iterable[Callable[[], Any]], count: Callable[[int], Any]) -> list[Wanted]:
    """The kernels that are not in Triton's cache, each told by its number; those found so far where a call fails, which it
    may do on results that nobody computed."""
    with Listing(lambda _: count(len(listed.missing))) as listed:
        try:
            for made, call in enumerate(calls):
                if made == SAMPLES and not listed.missing:
                    break
                call()
        except Exception:
            log.debug("no more kernels are listed", exc_info=True)
    return listed.missing


def compile_all(missing: Sequence[Wanted], jobs: int, report: Report = lambda done, all: None) -> list[str]:
    """Compile kernels into Triton's cache; what went wrong with each, empty where nothing did."""
    with _one_at_a_time:
        problems = answers_to(missing, jobs, report)
    for wanted, problem in zip(missing, problems, strict=True):
        if problem:
            log.debug("%s.%s: %s", wanted.module, wanted.name, problem)
    return problems


def answers_to(missing: Sequence[Wanted], jobs: int, report: Report) -> list[str]:
    problems = ["not compiled"] * len(missing)
    try:
        process = start(jobs)
        assert process.stdout is not None
        # Beside the reading, for while nobody reads its answers the process reads no more questions.
        threading.Thread(target=ask, args=(process, missing), daemon=True).start()
        for done in range(1, len(missing) + 1):
            answer = process.stdout.readline()
            if not answer:
                break  # the process has died: the rest are compiled where they are launched
            told = json.loads(answer)
            problems[told["number"]] = told["problem"]
            report(done, len(missing))
    except Exception:
        log.debug("no more kernels are compiled ahead", exc_info=True)
        stop()  # what it still answers would be taken for answers to the next questions
    except BaseException:  # Ctrl-C
        stop()
        raise
    return problems


def ask(process: subprocess.Popen[str], missing: Sequence[Wanted]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has died, or was stopped
        for number, wanted in enumerate(missing):
            process.stdin.write(json.dumps(wanted._asdict() | dict(number=number)) + "\n")
        process.stdin.flush()


_one_at_a_time = threading.Lock()  # all threads share the process, and an answer does not say whom it is for
_process: subprocess.Popen[str] | None = None


def start(jobs: int) -> subprocess.Popen[str]:
    """The process that compiles: the one there is, or a new one."""
    global _process
    if _process is None or _process.poll() is not None:
        stop()
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        _process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilestack.ahead.worker", str(jobs), "tilestack.kernels"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | dict(PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C is for us; we tell it
        )
        at_exit()
    return _process


@functools.cache
def at_exit() -> None:
    atexit.register(stop)
    os.register_at_fork(after_in_child=forget)


def forget() -> None:
    """In a fork of this process: what the other one started is not ours to ask or to end."""
    global _process, _one_at_a_time
    _process, _one_at_a_time = None, threading.Lock()


def stop() -> None:
    """End the process and all it started, in the middle of whatever they do."""
    global _process
    process, _process = _process, None
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # of what was not flushed
        process.communicate()


@contextlib.contextmanager
def bar(kernels: int) -> Iterator[Report]:
    """A bar on a terminal that counts kernels, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("compiling kernels", total=kernels)
        yield lambda done, all: shown.update(task, completed=done)
