"""What a result was made with: one hash over the source of an implementation and of the definition it replaces.

A row or a proof stays true as long as that source does. The source is the file that holds the implementation, the files
of kernels/ that it imports, directly or by way of others, the CUDA C++ beside them that they name, and the file that
defines the operator. Comments, docstrings and blank lines compile to nothing, so they count for nothing; nor do the sizes
that are only measured, a definition's `bench=` cases: another one to time changes neither a proof nor the rows of the rest.
"""

import ast
import functools
import hashlib
import importlib.util
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilestack.contract import registry

KERNELS = "tilestack.kernels"


def source_hash(operator_name: str, backend: str) -> str:
    """The hash of what an operator runs on a backend; of its definition alone where the backend has no file of ours."""
    operator = registry.operator_named(operator_name)
    files = {file_of_module(operator.definition.__module__)}
    if (implementation := operator.implementations.get(backend)) is not None:
        for function in (implementation.forward, implementation.backward):
            files |= files_behind(function)
    digest = hashlib.sha256()
    for name, text in sorted((path.name, code_of(path)) for path in files if path is not None):
        digest.update(f"{name}\n{text}\n".encode())
    return digest.hexdigest()[:16]


def files_behind(function: Any) -> set[Path]:
    """The file of a function and what it imports of kernels/; nothing for PyTorch's own functions."""
    module = getattr(function, "__module__", None) or ""
    if not module or module.partition(".")[0] == "torch":
        return set()
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and (path := file_of_module(name)) is not None:
            found[name] = path
            waiting += imported_kernels(path)
    return {*found.values(), *itertools.chain.from_iterable(map(named_cuda_sources, found.values()))}


@functools.cache
def named_cuda_sources(path: Path) -> frozenset[Path]:
    """The `.cu` and `.cuh` files in a file's folder whose names it has in it, and those that they have in them."""
    text = path.read_text()
    named = [each for each in path.parent.glob("*.cu*") if f'"{each.name}"' in text and each != path]
    return frozenset(named).union(*map(named_cuda_sources, named))


def file_of_module(name: str) -> Path | None:
    """Where a module lies; None for one that is built in, or a package, which only gathers files."""
    loaded = sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    if origin is None and loaded is None:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
    path = Path(origin) if origin else None
    return path if path is not None and path.is_file() and path.name != "__init__.py" else None


@functools.cache
def imported_kernels(path: Path) -> tuple[str, ...]:
    """The modules of kernels/ that a file imports anywhere in it."""
    return tuple(dict.fromkeys(_imported_kernels(ast.parse(path.read_text()))))


def _imported_kernels(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(f"{KERNELS}.") and is_module(name):
                yield name


def is_module(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package, so the name is that of a function
        return False


@functools.cache
def code_of(path: Path) -> str:
    """A file's text without comments, docstrings, blank lines and cases that are only measured."""
    text = path.read_text()
    if path.suffix != ".py":
        return without_blank_lines(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).splitlines())
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    for measured in sorted(measured_cases(tree), key=lambda node: -node.lineno):
        assert measured.end_lineno is not None
        first, last = measured.lineno - 1, measured.end_lineno - 1
        before = lines[first].encode()[: measured.col_offset]  # the parser counts bytes
        after = lines[last].encode()[measured.end_col_offset :]
        lines[first : last + 1] = [(before + after).decode(), *[""] * (last - first)]
    return without_blank_lines(lines)


def measured_cases(tree: ast.Module) -> list[ast.keyword]:
    """The `bench=` of every call of `cases`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cases")
    return [keyword for call in calls for keyword in call.keywords if keyword.arg == "bench"]


def without_blank_lines(lines: list[str]) -> str:
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))
