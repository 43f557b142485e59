"""What a result was made with: one hash over the code that an implementation runs and the definition it replaces.

A row or a proof stays true as long as that code does. It is followed statement by statement, from the functions of an
implementation and from the definition to every name they mention, in files of ops/ and kernels/ and the CUDA C++ beside
them:

    softmax, rows.py ─► distribution ─► softmax_fwd_kernel ─► wide, tiles.py
         └► softmax, ops/softmax.py ─► score_cases ─► ROW_CHECKS, contract/cases.py

so that another kernel in the same file, or a helper nobody here calls, can change without a trace. What treats every call
alike, contract/ and what autocast does, is followed no further than to its constants. Comments, docstrings and blank lines
compile to nothing, so they count for nothing; nor do the sizes that are only measured, a definition's `bench=` cases.
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
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tilestack.contract import registry

KERNELS = "tilestack.kernels"
FOLLOWED = (f"{KERNELS}.", "tilestack.ops.")
CONSTANTS_FOLLOWED = ("tilestack.contract.", "tilestack.ops.autocast")
T = TypeVar("T")
IMPORTS = ast.Import | ast.ImportFrom
EFFECTS = ast.Expr, ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Delete, ast.Assert


class Statement(NamedTuple):
    """A statement at the top of a file, by its lines; decorators are part of what they decorate."""

    path: Path
    first: int
    last: int

    @property
    def code(self) -> str:
        return without_blank_lines(code_lines(self.path)[self.first - 1 : self.last])


class Mention(NamedTuple):
    """A name in a statement, and the attribute that is taken of it there."""

    name: str
    attribute: str = ""


class Import(NamedTuple):
    """Where a name comes from: a module (no `name`) or what a module calls so."""

    module: str
    name: str = ""

    @property
    def whole(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def source_hash(operator_name: str, backend: str) -> str:
    """The hash of what an operator runs on a backend; of its definition alone where the backend has no code of ours."""
    operator = registry.operator_named(operator_name)
    reached = Reached([operator.definition, *functions_of(operator.implementations.get(backend))])
    digest = hashlib.sha256()
    for part in sorted({f"{each.path.name}\n{each.code}" for each in reached.statements} | reached.others):
        digest.update(f"{part}\n".encode())
    for path in sorted(reached.cuda_sources(), key=lambda path: path.name):
        digest.update(f"{path.name}\n{code_of(path)}\n".encode())
    return digest.hexdigest()[:16]


def functions_of(implementation: Any) -> list[Callable]:
    """What an implementation was registered with that can be called; none where there is none."""
    extras = getattr(implementation, "extras", None)
    named = [(implementation, name) for name in ("forward", "backward", "when", "repeat")]
    named += [(extras, name) for name in ("forward", "backward", "when", "fake")]
    return [function for owner, name in named if callable(function := getattr(owner, name, None))]


def files_run_by(functions: Iterable[Callable]) -> set[Path]:
    """The files that hold what some functions run, of CUDA C++ too; none for PyTorch's own functions."""
    reached = Reached(functions)
    return {each.path for each in reached.statements} | reached.cuda_sources()


def made_of(functions: Iterable[Callable]) -> list[Callable]:
    """Some functions and those that they were made of: what a decorator, `functools.partial` or a function that makes
    functions was given, wherever that lies."""
    found: dict[int, Callable] = {}
    waiting: list[Any] = list(functions)
    while waiting:
        function = waiting.pop()
        if id(function) in found:
            continue
        found[id(function)] = function
        given = [getattr(function, "__wrapped__", None), *map(content, getattr(function, "__closure__", None) or ())]
        if isinstance(function, functools.partial):
            given += [function.func, *function.args, *function.keywords.values()]
        kernels = (getattr(each, "fn", each) for each in given)  # Triton's, interpreted or not
        waiting += [each for each in kernels if isinstance(each, types.FunctionType | functools.partial)]
    return [each for each in found.values() if not isinstance(each, functools.partial)]


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was given nothing yet
        return None


class Reached:
    """The statements that some functions run, by way of every name that is mentioned; `others` are the names that lead out
    of what is followed."""

    def __init__(self, functions: Iterable[Callable]):
        self.statements: set[Statement] = set()
        self.others: set[str] = set()
        waiting = [statement for function in made_of(functions) for statement in self.of_function(function)]
        while waiting:
            if (statement := waiting.pop()) not in self.statements:
                self.statements.add(statement)
                waiting += self.next_to(statement)

    def of_function(self, function: Callable) -> Iterable[Statement]:
        """The statement that a function lies in; all of its file where that is not to be found."""
        module = getattr(function, "__module__", None) or ""
        path = None if module.startswith(CONSTANTS_FOLLOWED) or is_pytorchs(module) else file_of_module(module)
        if path is None:
            self.others.add(f"{module}.{getattr(function, '__qualname__', '')}")
            return []
        code: Any = getattr(function, "__code__", None)
        in_it = code is not None and Path(code.co_filename) == path
        around = [each for each in read_file(path).mentions if in_it and each.first <= code.co_firstlineno <= each.last]
        return around or read_file(path).mentions

    def next_to(self, statement: Statement) -> Iterator[Statement]:
        """What a statement mentions, and what works upon a name that it binds, such as a call that registers it."""
        read = read_file(statement.path)
        for mention in read.mentions[statement]:
            yield from read.bound.get(mention.name, ())
            for imported in read.imported.get(mention.name, ()):
                yield from self.of_import(imported, mention.attribute)
        for name in read.binds[statement]:
            yield from read.effects.get(name, ())

    def of_import(self, imported: Import, attribute: str = "") -> Iterable[Statement]:
        """What an imported name stands for: statements of another file, and of a module all where it is not known which."""
        ours = imported.whole.startswith((*FOLLOWED, *CONSTANTS_FOLLOWED))
        if ours and imported.name and is_module(imported.whole):
            imported = Import(imported.whole)
        name = imported.name or attribute
        path = file_of_module(imported.module) if ours else None
        read = read_file(path) if path is not None else NOTHING_READ
        found = [*read.bound.get(name, ()), *(s for more in read.imported.get(name, ()) for s in self.of_import(more))]
        if not found and not imported.name:
            found = list(read.mentions)
        if imported.module.startswith(CONSTANTS_FOLLOWED):
            found = [each for each in found if each in read.constants]
        if not found:
            self.others.add(imported.whole)
        return found

    def cuda_sources(self) -> set[Path]:
        named = (named_cuda_sources(each.path.parent, each.code) for each in self.statements)
        return set(itertools.chain.from_iterable(named))


class Reading(NamedTuple):
    """A file of Python by its statements."""

    mentions: dict[Statement, frozenset[Mention]]  # in the order of the file
    binds: dict[Statement, frozenset[str]]
    bound: dict[str, list[Statement]]
    effects: dict[str, list[Statement]]  # by the names of the file that they mention
    imported: dict[str, list[Import]]  # at the top or in a function
    constants: frozenset[Statement]  # those that only give names a value


NOTHING_READ = Reading({}, {}, {}, {}, {}, frozenset())


@functools.cache
def read_file(path: Path) -> Reading:
    tree = ast.parse(path.read_text())
    for call in calls_of_cases(tree):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "bench"]
    nodes = {
        Statement(path, min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]), node.end_lineno or node.lineno): node
        for node in tree.body
        if not isinstance(node, IMPORTS) and not is_docstring(node)
    }  # fmt: skip
    mentions = {statement: frozenset(mentions_in(node)) for statement, node in nodes.items()}
    binds = {statement: frozenset(names_bound_by(node)) for statement, node in nodes.items()}
    bound = by_name((name, statement) for statement, names in binds.items() for name in names)
    working = [statement for statement, node in nodes.items() if isinstance(node, EFFECTS)]
    effects = by_name((name, each) for each in working for name, _ in mentions[each] if name in bound)
    constants = frozenset(each for each, node in nodes.items() if isinstance(node, ast.Assign | ast.AnnAssign))
    return Reading(mentions, binds, bound, effects, by_name(imports_in(tree)), constants)


def by_name(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mentions_in(node: ast.stmt) -> Iterator[Mention]:
    """Every name in a statement, those of local variables too, which then count as what they hide."""
    attributes = {id(part.value): part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield Mention(part.id, attributes.get(id(part), ""))


def names_bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives something to, or to a part of which it does: `f`, `table` in `table["x"] = 1`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    targets: Iterable[ast.AST] = node.targets if isinstance(node, ast.Assign) else [node]
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    walrus = [part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
    for part in itertools.chain.from_iterable(map(ast.walk, (*targets, *walrus))):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            yield from (inner.id for inner in ast.walk(part.value) if isinstance(inner, ast.Name))
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.alias) and isinstance(node, ast.If):  # whose condition decides what is imported
            yield part.asname or part.name.partition(".")[0]


def imports_in(tree: ast.Module) -> Iterator[tuple[str, Import]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], Import(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, Import(node.module, alias.name)


@functools.cache
def named_cuda_sources(folder: Path, code: str) -> frozenset[Path]:
    """The `.cu` and `.cuh` files in a folder whose names some code has in it, and those that they have in them."""
    named = [each for each in folder.glob("*.cu*") if f'"{each.name}"' in code]
    within = (named_cuda_sources(folder, each.read_text().replace(f'"{each.name}"', "")) for each in named)
    return frozenset(named).union(*within)


def is_pytorchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


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
    imported = (each for _, each in imports_in(ast.parse(path.read_text())))
    names = dict.fromkeys(name for each in imported for name in (each.module, each.whole))
    return tuple(name for name in names if name.startswith(f"{KERNELS}.") and is_module(name))


@functools.cache
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
    if path.suffix == ".py":
        return without_blank_lines(code_lines(path))
    return without_blank_lines(re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL).splitlines())


@functools.cache
def code_wherever_it_lies(path: Path) -> str:
    """A file's name and code without the modules that it imports from, so that its folder and theirs can be moved."""
    if path.suffix != ".py":
        return f"{path.name}\n{code_of(path)}"
    lines, tree = list(code_lines(path)), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            lines[node.lineno - 1] = re.sub(r"from\s+[.\w]+\s+import", "import", lines[node.lineno - 1])
    at_the_top = [line for node in tree.body if isinstance(node, IMPORTS) for line in span(node)]
    imported = sorted(lines[line] for line in at_the_top)  # the order of modules is that of their names
    for line in at_the_top:
        lines[line] = ""
    return without_blank_lines([path.name, *imported, *lines])


def span(node: ast.stmt) -> range:
    """The lines of a statement, counted from 0."""
    return range(node.lineno - 1, node.end_lineno or node.lineno)


@functools.cache
def code_lines(path: Path) -> list[str]:
    """A file of Python line by line, empty where there is nothing that counts."""
    text = path.read_text()
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
    return lines


def measured_cases(tree: ast.Module) -> list[ast.keyword]:
    """The `bench=` of every call of `cases`."""
    return [keyword for call in calls_of_cases(tree) for keyword in call.keywords if keyword.arg == "bench"]


def calls_of_cases(tree: ast.Module) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if getattr(call.func, "id", "") == "cases"]


def without_blank_lines(lines: list[str]) -> str:
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))
