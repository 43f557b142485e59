"""The processes in which chat templates run, seen from here: started once, asked by lines of JSON, stopped when late.

There is one for each core, and many conversations are shared among them. They are kept between questions, since starting
one takes longer than most of them. One that died or was stopped is started anew by the next question.

A template has so many seconds of the processor, not of the clock, and its process's start is not among them: a machine that
is busy with other things is no fault of the template's.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from queue import LifoQueue
from typing import Any

from tilestack.data.errors import DataError, needs

PROGRAM = Path(__file__).with_name("chat_worker.py")
MEMORY = 1 << 29  # bytes that it may take in all
SECONDS = 10.0  # of the processor, for one conversation
PATIENCE = 120.0  # seconds of the clock until its answer; for a start as many
PART = 1 << 16  # characters of conversations that are asked about at a time


def ask(template: str, what: str, conversations: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the workers say of each conversation, in order; see `chat_worker` for the words."""
    needs("jinja2", "a chat template")
    free = _processes(os.getpid())  # a process that was forked from this one needs workers of its own

    def answers(part: Sequence[str]) -> list[dict[str, Any]]:
        process = free.get()
        try:
            return process.ask(template, what, part)
        finally:
            free.put(process)

    first, *others = _parts(conversations) or [[]]
    if not others:
        yield from answers(first) if first else ()
        return
    with ThreadPoolExecutor(cores()) as asking:
        for replies in asking.map(answers, [first, *others]):
            yield from replies


def _parts(conversations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Conversations in JSON, some at a time."""
    parts: list[list[str]] = []
    size = PART
    for conversation in conversations:
        try:
            line = json.dumps(conversation)
        except (TypeError, ValueError, RecursionError) as problem:
            raise DataError(f"a conversation must be what JSON can hold: {problem}") from problem
        if size >= PART:
            parts.append([])
            size = 0
        parts[-1].append(line)
        size += len(line)
    return parts


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _processes(owner: int) -> "LifoQueue[ChatProcess]":
    """The workers that nobody is asking; the one used last comes first, so that a few questions start but one."""
    free: LifoQueue[ChatProcess] = LifoQueue()
    for _ in range(cores()):
        free.put(made := ChatProcess())
        atexit.register(made.stop)
    return free


class ChatProcess:
    """The worker, which is started when it is first asked."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.worker: subprocess.Popen[bytes] | None = None
        self.unread = bytearray()
        self.turn = threading.Lock()

    def ask(self, template: str, what: str, conversations: Sequence[str]) -> list[dict[str, Any]]:
        """The worker's answers about conversations in JSON."""
        head = json.dumps({"template": template, "ask": what, "seconds": SECONDS})[:-1]
        line = f'{head}, "conversations": [{", ".join(conversations)}]}}\n'.encode()
        with self.turn:
            try:
                self._write(line)
                return [json.loads(self._line()) for _ in conversations]
            except TimeoutError:
                self.stop()
                raise DataError(
                    f"the process that renders chat templates did not answer within {PATIENCE:g} seconds; is this machine too busy?"
                ) from None
            except (EOFError, BrokenPipeError):
                if self.stop() == -signal.SIGPROF:
                    raise DataError(
                        f"the chat template took more than {SECONDS:g} seconds for a conversation; it is not usable"
                    ) from None
                raise DataError("the chat template ended the process that renders it; it is not usable") from None
            except BaseException:
                self.stop()  # whatever it was, answers may be left in the pipe
                raise

    def _write(self, line: bytes) -> None:
        if self.worker is None or self.worker.poll() is not None:
            self.unread.clear()
            self.worker = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for those who asked, not for it
            )
            self._line()  # which says that it has started
        assert self.worker.stdin is not None
        self.worker.stdin.write(line)
        self.worker.stdin.flush()

    def _line(self) -> bytes:
        assert self.worker is not None
        assert self.worker.stdout is not None
        late, searched = time.monotonic() + PATIENCE, 0
        waiting = select.poll()
        waiting.register(self.worker.stdout, select.POLLIN)
        while (end := self.unread.find(b"\n", searched)) < 0:
            searched = len(self.unread)
            if not waiting.poll(max(0.0, late - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(self.worker.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            self.unread += piece
        line = bytes(self.unread[:end])
        del self.unread[: end + 1]
        return line

    def stop(self) -> int | None:
        """End the worker; answers how it ended, which may have been before."""
        worker, self.worker = self.worker, None
        if worker is None or os.getpid() != self.owner:  # a fork that ends takes nothing from its parent
            return None
        worker.kill()
        worker.communicate()  # closes the pipes and waits for its end
        return worker.returncode
