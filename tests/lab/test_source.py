"""The hash of what was measured or proved: it follows the code that runs, and nothing else."""

import ast
import functools
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from tilestack import contract, ops
from tilestack.lab import source
from tilestack.lab.source import (
    KERNELS,
    Import,
    Reached,
    Statement,
    code_lines,
    code_of,
    code_wherever_it_lies,
    file_of_module,
    files_run_by,
    functions_of,
    imported_kernels,
    read_file,
    source_hash,
)  # fmt: skip
from tilestack.lab.stale import PACKAGE

CODE = '''"""About it."""
import math  # why


def f(x):
    """What."""
    if x:
        x += 1
        x += 2
    return x + 1
'''


def reached(operator, backend="triton"):
    found = ops.operator_named(operator)
    return Reached([found.definition, *functions_of(found.implementations[backend])])


def names_behind(operator, backend="triton"):
    return {path.name for path in files_run_by(functions_of(ops.operator_named(operator).implementations[backend]))}


def test_it_reaches_what_a_kernel_mentions_by_way_of_others():
    assert {"activation_dropout.py", "dropout.py", "activation.py", "tiles.py"} <= names_behind("activation_dropout")
    assert "cross_entropy.py" not in names_behind("softmax")
    assert {"softmax.py", "numerics.py", "cases.py"} <= {each.path.name for each in reached("softmax").statements}


def test_it_reaches_the_cuda_sources_that_a_statement_names():
    assert {"softmax.py", "softmax.cu", "common.cuh", "build.py"} <= names_behind("softmax", "cuda")
    assert "add.cu" not in names_behind("softmax", "cuda")


def test_every_way_to_import_a_kernel_is_followed(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(
        "import tilestack.kernels.tiles\nimport tilestack.files, os\nfrom tilestack.kernels import early\n"
        "def later():\n    from tilestack.kernels.cuda.build import compiled\n"
    )
    assert set(imported_kernels(path)) == {f"{KERNELS}.tiles", f"{KERNELS}.early", f"{KERNELS}.cuda.build"}


@pytest.mark.parametrize(("operator", "backend"), [("softmax", "triton"), ("softmax", "cuda"), ("relu", "aten")])
def test_a_change_of_what_is_reached_is_another_hash_and_of_the_rest_of_its_files_is_not(
    operator, backend, monkeypatch
):
    before, mine = source_hash(operator, backend), reached(operator, backend).statements
    rest = {each for path in {each.path for each in mine} for each in read_file(path).mentions} - mine
    assert rest
    code = Statement.code.fget
    for changed in (*mine, *sorted(rest)[::5]):
        monkeypatch.setattr(Statement, "code", property(lambda each: "x = 1" if each == changed else code(each)))
        assert (source_hash(operator, backend) == before) == (changed in rest), changed


def test_a_change_of_cuda_sources_is_another_hash(monkeypatch):
    before = source_hash("softmax", "cuda")
    monkeypatch.setattr(source, "code_of", lambda path: "x" if path.name == "common.cuh" else code_of(path))
    assert source_hash("softmax", "cuda") != before


def test_a_backward_in_another_file_than_its_forward_is_followed(monkeypatch):
    ours = ops.operator_named("softmax").implementations["triton"]
    made = lambda forward, backward: SimpleNamespace(
        definition=ops.operator_named("softmax").definition,
        implementations={"mixed": SimpleNamespace(forward=forward, backward=backward)},
    )
    hashes = []
    for forward, backward in ((torch.softmax, None), (torch.softmax, ours.forward), (ours.forward, None)):
        monkeypatch.setattr(source.registry, "operator_named", lambda name: made(forward, backward))
        hashes.append(source_hash("softmax", "mixed"))
    assert hashes[0] not in hashes[1:]


def test_whatever_an_implementation_was_registered_with_is_followed():
    functions = [lambda: None for _ in range(8)]
    extras = SimpleNamespace(**dict(zip(("forward", "backward", "when", "fake"), functions, strict=False)))
    given = dict(zip(("forward", "backward", "when", "repeat"), functions[4:], strict=True))
    assert set(functions_of(SimpleNamespace(extras=extras, **given))) == set(functions)
    assert functions_of(SimpleNamespace(forward=functions[0], backward="autograd")) == functions[:1]
    assert functions_of(None) == []


def test_another_function_of_pytorch_is_another_hash(monkeypatch):
    relu, before = ops.operator_named("relu").implementations["aten"], source_hash("relu", "aten")
    monkeypatch.setattr(relu, "forward", torch.sigmoid)
    assert source_hash("relu", "aten") != before


def test_a_name_that_its_module_has_from_another_is_followed_there():
    (found,) = Reached([]).of_import(Import(f"{KERNELS}.softmax.rows", "wide"))
    assert found.path == file_of_module(f"{KERNELS}.tiles")


MADE_UP = """
import os
from math import sin as wave
from tilestack.kernels import tiles
from tilestack.kernels.tiles import cdiv

SIZE = 3
TABLE = {}
TABLE["small"] = 1
TABLE["large"] = SIZE
unused = 4
other: int = 5

def helper(x):
    from tilestack.kernels.early import start_early
    return cdiv(x, len(TABLE))

class Plan:
    size = other

def forward(x):
    return helper(x) + Plan.size

def waves(x):
    return wave(x) + tiles.next_power(x)

def everything(x):
    return vars(tiles)

def register(function):
    return function

register(waves)
for each in (unused,):
    register(each)
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    (tmp_path / "made_up_kernels.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("made_up_kernels")
    yield module
    del sys.modules["made_up_kernels"]


def heads(found):
    return {each.code.splitlines()[0] for each in found.statements if each.path.name == "made_up_kernels.py"}


def test_names_are_followed_in_their_file(made_up):
    assert heads(Reached([made_up.forward])) == {
        "def forward(x):", "def helper(x):", "class Plan:", "other: int = 5",
        "TABLE = {}", 'TABLE["small"] = 1', 'TABLE["large"] = SIZE', "SIZE = 3",
    }  # fmt: skip


def test_what_works_upon_a_name_is_reached_with_it(made_up):
    found = Reached([made_up.waves])
    assert {"register(waves)", "def register(function):"} <= heads(found)
    assert "def forward(x):" not in heads(found)
    assert "math.sin" in found.others


def test_of_a_module_only_what_is_taken_is_reached_and_all_where_that_is_not_known(made_up):
    of_tiles = lambda function: {each.first for each in Reached([function]).statements if each.path.name == "tiles.py"}
    everything = {each.first for each in read_file(file_of_module(f"{KERNELS}.tiles")).mentions}
    assert 0 < len(of_tiles(made_up.forward)) < len(everything)
    assert 0 < len(of_tiles(made_up.waves)) < len(everything)
    assert of_tiles(made_up.everything) >= everything


def test_a_function_that_lies_in_no_statement_stands_for_its_file(made_up):
    made_up.forward.__code__ = made_up.forward.__code__.replace(co_filename="elsewhere.py")
    assert {"unused = 4", "def everything(x):"} <= heads(Reached([made_up.forward]))


WAYS_TO_BIND = """
import functools
for size in (1, 2):
    LAST = size
FIRST = [(WITHIN := 3)]
if LAST:
    from tilestack.kernels.tiles import cdiv as part
else:
    from tilestack.kernels.tiles import next_power as part
COUNT = 1
COUNT += 1
with open(__file__) as READ:
    pass

def decorated(function):
    @functools.wraps(function)
    def inner(x):
        return function(x)
    return inner

@decorated
def forward(x):
    return x + {}

def made(function):
    return lambda x: function(x)

def helper(x, y=1):
    return x

def another(y):
    return y
"""


@pytest.fixture
def ways_to_bind(tmp_path, monkeypatch):
    def write(mentioned):
        (tmp_path / "made_up_kernels.py").write_text(WAYS_TO_BIND.replace("{}", mentioned))
        sys.modules.pop("made_up_kernels", None)
        read_file.cache_clear()
        code_lines.cache_clear()
        importlib.invalidate_caches()
        return importlib.import_module("made_up_kernels")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    del sys.modules["made_up_kernels"]
    read_file.cache_clear()
    code_lines.cache_clear()


@pytest.mark.parametrize(
    ("mentioned", "head"),
    [
        ("LAST", "for size in (1, 2):"), ("WITHIN", "FIRST = [(WITHIN := 3)]"), ("part(1, 2)", "if LAST:"),
        ("COUNT", "COUNT += 1"), ("READ", "with open(__file__) as READ:"),
    ],
)  # fmt: skip
def test_whatever_gives_a_name_its_value_is_reached(ways_to_bind, mentioned, head):
    found = heads(Reached([ways_to_bind(mentioned).forward]))
    assert {"@decorated", "def decorated(function):", head} <= found  # though the code of a wrapper is not in `forward`


def closing_over(function):
    def inner(x):
        return function(x) if x else inner(x)

    return inner


def test_what_a_function_was_made_of_is_reached_wherever_it_was_made(ways_to_bind):
    mine = ways_to_bind("1")
    both = {"def helper(x, y=1):", "def another(y):"}
    partial = functools.partial(mine.helper, y=mine.another)
    assert heads(Reached([closing_over(mine.helper)])) == {"def helper(x, y=1):"}
    assert heads(Reached([closing_over(SimpleNamespace(fn=mine.another))])) == {"def another(y):"}
    assert {each.path.name for each in Reached([partial]).statements} == {"made_up_kernels.py"}
    assert heads(Reached([partial])) == heads(Reached([closing_over(partial)])) == both


def test_every_name_of_ours_leads_to_its_code():
    """Not to a package, which is not read, nor by a star or from a relative module, which are not followed."""
    leads_out = "tilestack.contract.", "tilestack.ops.autocast.", "tilestack.tuning.model."
    for op in ops.operators():
        for backend in op.implementations:
            ours = {name for name in reached(op.name, backend).others if name.startswith("tilestack")}
            assert {name for name in ours if not name.startswith(leads_out)} <= {"tilestack.ops"}, (op.name, backend)
    for path in sorted(path for folder in ("kernels", "ops") for path in (PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                assert [alias.name for alias in node.names] != ["*"], path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert getattr(node.func.value, "id", "") != "ops", (
                    path,
                    node.lineno,
                )  # it is not known what would run


def test_no_statement_of_a_file_is_passed_over():
    """But for imports and docstrings, every line of code of a file is one of a statement's."""
    for name in (f"{KERNELS}.softmax.rows", "tilestack.ops.attention", f"{KERNELS}.aten"):
        path = file_of_module(name)
        of_statements = {line for each in read_file(path).mentions for line in range(each.first, each.last + 1)}
        left = [line for number, line in enumerate(code_lines(path), 1) if line.strip() and number not in of_statements]
        assert all(line.startswith(("import ", "from ", "    ", ")")) for line in left), left


def test_comments_of_cuda_sources_count_for_nothing(tmp_path):
    before, after, other = (tmp_path / name for name in ("before.cu", "after.cu", "other.cu"))
    before.write_text("// a sum\nint f(int x) { return x + 1; }  /* of\ntwo */\n")
    after.write_text("int f(int x) { return x + 1; }\n\n")
    other.write_text("int f(int x) { return x - 1; }\n")
    assert code_of(before) == code_of(after) != code_of(other)


@pytest.mark.parametrize(
    ("moved", "same"),
    [
        ("from b.d import f\nfrom c import g as h\n\n\ndef k():\n    from x import y\n", True),
        ("from c import g as h\nfrom d.b import f\n\n\ndef k():\n    from z.x import y\n", True),
        ("from b.d import f\nfrom c import g\n\n\ndef k():\n    from x import y\n", False),
        ("from b.d import f\nfrom c import g as h\n\n\ndef k():\n    from x import z\n", False),
        ("from b.d import f\nfrom c import g as h\n\n\ndef k():\n    import y\n    y()\n", False),
    ],
)
def test_files_may_move(tmp_path, moved, same):
    before, after = tmp_path / "a" / "same.py", tmp_path / "e" / "same.py"
    for path, text in ((before, "from b.d import f\nfrom c import g as h\n\n\ndef k():\n    from x import y\n"), (after, moved)):  # fmt: skip
        path.parent.mkdir()
        path.write_text(text)
    assert (code_wherever_it_lies(before) == code_wherever_it_lies(after)) is same
    assert code_wherever_it_lies(before) != code_wherever_it_lies(before.rename(tmp_path / "other.py"))


def test_every_implementation_has_a_hash_and_different_files_differ():
    hashes = {(op.name, name): source_hash(op.name, name) for op in ops.operators() for name in op.implementations}
    assert all(len(found) == 16 for found in hashes.values())
    assert hashes["softmax", "triton"] != hashes["softmax", "torch"] != hashes["rms_norm", "torch"]
    assert hashes["softmax", "triton"] != hashes["log_softmax", "triton"]  # though one file makes both
    assert source_hash("softmax", "compile") == hashes["softmax", "torch"]  # a peer runs the definition


def test_pytorch_has_no_file_of_ours():
    assert not files_run_by(functions_of(ops.operator_named("relu").implementations["aten"]))
    assert file_of_module(KERNELS) is None


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# why", "# because", True),
        ("What.", "What it\n    does.", True),
        ("\n\n\ndef", "\ndef", True),
        ("x + 1", "x - 1", False),
        ("import math  # why", "import cmath  # why", False),
        ("        x += 2", "    x += 2", False),
    ],
)
def test_only_what_compiles_counts(tmp_path, old, new, same):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(CODE)
    after.write_text(CODE.replace(old, new))
    assert (code_of(before) == code_of(after)) is same


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ("rows = cases(make_é, check=[(1, 2)], bench=[(8, 9), (10, 11)], gpu=[(3,)])", True),
        ("rows = cases(make_é, check=[(1, 2)], bench=[  # large\n    (8, 9),\n], gpu=[(3,)])", True),
        ("rows = cases(make_é, check=[(1, 3)], bench=[(8, 9)], gpu=[(3,)])", False),
        ("rows = cases(make_é, check=[(1, 2)], bench=[(8, 9)], gpu=[(4,)])", False),
        ("rows = other(make_é, check=[(1, 2)], bench=[(8, 9)], gpu=[(3,)])", False),
    ],
)
def test_cases_that_are_only_measured_count_for_nothing(tmp_path, changed, same):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("rows = cases(make_é, check=[(1, 2)], bench=[(8, 9)], gpu=[(3,)])\nmore = 1\n")
    after.write_text(changed + "\nmore = 1\n")
    assert (code_of(before) == code_of(after)) is same


@pytest.mark.usefixtures("outside")
def test_a_backend_from_outside_is_hashed_by_its_own_file():
    contract.implements(ops.relu, backend="mine")(lambda x: x.clamp_min(0))
    assert source_hash("relu", "mine") not in (source_hash("relu", "torch"), source_hash("relu", "triton"))
