"""What the tests of tests/gpu name in a module is there: where there is no GPU nothing else would tell that it was moved."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilestack.lab import machine

FOLDER = Path(__file__).parents[2] / "gpu"


def missing_names(source: str, scope: dict[str, object]) -> list[str]:
    """The names that code reads in modules it has in its scope, imports anywhere in it, or puts something else in place of,
    and that are not there; programs in its strings are looked at, too."""
    tree = ast.parse(source)
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = {name: value for name, value in scope.items() if name not in own}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            home = importlib.import_module(node.module)
            found += [f"{node.module}.{each.name}" for each in node.names if not is_in(home, each.name)]
        elif isinstance(node, ast.Attribute):
            found += absent(node.value, node.attr, modules)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and len(node.args) == 3:
            place, name, _ = node.args
            found += absent(place, name.value, modules) if isinstance(name, ast.Constant) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\nimport " in node.value:
            found += missing_names(node.value, {})
    return sorted(set(found))


def absent(place: ast.expr, name: str, modules: dict[str, object]) -> Iterator[str]:
    home = value_of(place, modules)
    if isinstance(home, ModuleType | type) and not is_in(home, name):
        yield f"{home.__name__}.{name}"


def value_of(place: ast.expr, modules: dict[str, object]) -> object:
    if isinstance(place, ast.Attribute):
        home = value_of(place.value, modules)
        return getattr(home, place.attr, None) if isinstance(home, ModuleType | type) else None
    return modules.get(place.id) if isinstance(place, ast.Name) else None


def is_in(home: object, name: str) -> bool:
    """Whether a module or a class has a name; a package has its modules, imported or not."""
    path = getattr(home, "__path__", None)
    return hasattr(home, name) or (path is not None and importlib.util.find_spec(f"{home.__name__}.{name}") is not None)


@pytest.fixture
def imported(monkeypatch):
    """Imports a file of tests/gpu by its name, and leaves no module behind that pytest had not imported itself."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_what_is_named_is_there(path, imported):
    assert missing_names(path.read_text(), vars(imported(path.stem))) == []


MOVED = '''
import sys
import torch
from tilestack.lab import machine

PROGRAM = """
import torch
from tilestack.lab.bench.timing import measure, quickly
"""

def test_it(monkeypatch, early):
    from tilestack.lab.machine import no_longer
    assert machine.renamed(torch.cuda.Stream, torch.cuda.Streams, early.anything) and sys.path
    monkeypatch.setattr(machine, "gone", lambda: None)
    monkeypatch.setattr(machine, "stamp", lambda: None)
'''


def test_what_was_moved_is_seen():
    scope = dict(torch=torch, machine=machine, sys=sys, early=sys)
    assert missing_names(MOVED, scope) == [
        "tilestack.lab.bench.timing.quickly",
        "tilestack.lab.machine.gone",
        "tilestack.lab.machine.no_longer",
        "tilestack.lab.machine.renamed",
        "torch.cuda.Streams",
    ]
    with pytest.raises(ModuleNotFoundError, match=r"tilestack\.lab\.timing"):
        missing_names(MOVED.replace("lab.bench.timing", "lab.timing"), scope)
