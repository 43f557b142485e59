"""Which lines of files of kernels a call reaches: Python's tracing, which sees kernels too where Triton interprets them."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

Lines = dict[str, set[int]]  # by file


class reached_lines(AbstractContextManager["reached_lines"]):
    """Inside, every line that this thread executes in some files is noted, but for what is executed while it is paused."""

    def __init__(self, files: Iterable[str]):
        self.lines: Lines = {file: set() for file in files}

    def __enter__(self) -> "reached_lines":
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        sys.settrace(self.before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        sys.settrace(self.before)
        try:
            yield
        finally:
            sys.settrace(self.enter)

    def enter(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        mine = self.lines.get(frame.f_code.co_filename)
        if mine is None:
            return None

        def note(frame: FrameType, event: str, argument: Any) -> Callable:
            mine.add(frame.f_lineno)
            return note

        return note


def forget_cached_results(modules: Iterable[Any]) -> None:
    """Empty the caches of functions, so that a call which one of them would answer reaches their lines again."""
    for module in modules:
        for value in list(vars(module).values()):
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()
