"""The one place that writes code: functions made from text, so that a call runs only the Python its signature needs.

An operator's `__call__`, its autograd function, a kernel's launcher and a repeated call are all written this way. Texts
are compiled once, whatever they are bound to: two shapes whose functions differ only in numbers share one text, and the
numbers are names in its scope. `source_of(function)` prints what was written; tracebacks show it too.
"""

import functools
import itertools
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any

TEXTS_KEPT = 4096

_numbers = itertools.count()


def write_function(name: str, text: str, scope: dict[str, Any]) -> Callable:
    """The function `name` that a text defines, with a scope of its own for the names it uses."""
    exec(_compiled(text), scope)
    return scope[name]


def source_of(function: Callable) -> str:
    """The text a function was made from; empty where it was not written here."""
    code = getattr(function, "__code__", None)
    return "".join(linecache.cache[code.co_filename][2]) if code and code.co_filename in linecache.cache else ""  # type: ignore[misc]


@functools.lru_cache(maxsize=TEXTS_KEPT)
def _compiled(text: str) -> CodeType:
    lines = text.strip("\n").splitlines(keepends=True)
    file = f"<tilestack source {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, lines, file)
    return compile("".join(lines), file, "exec")


def listed(words: Any) -> str:
    """Words for a tuple or an argument list, each with its comma."""
    return "".join(f"{word}, " for word in words)


def lines(*texts: str, indent: int = 4) -> str:
    """The lines that are not empty, indented as the body of a function."""
    return "\n".join(" " * indent + text for text in texts if text)
