"""The hash of what was measured or proved: it follows the code that runs, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from tilestack import contract, ops
from tilestack.lab import source
from tilestack.lab.source import KERNELS, code_of, file_of_module, files_behind, imported_kernels, source_hash

CODE = '''"""About it."""
import math  # why


def f(x):
    """What."""
    if x:
        x += 1
        x += 2
    return x + 1
'''


def names_behind(operator, backend="triton"):
    return {path.name for path in files_behind(ops.operator_named(operator).implementations[backend].forward)}


def test_it_reaches_what_a_kernel_imports_by_way_of_others():
    assert {"activation_dropout.py", "dropout.py", "activation.py", "tiles.py"} <= names_behind("activation_dropout")
    assert "cross_entropy.py" not in names_behind("softmax")


def test_it_reaches_the_cuda_sources_that_a_file_names():
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
def test_a_change_of_any_file_behind_an_implementation_is_another_hash(operator, backend, monkeypatch):
    before, found = source_hash(operator, backend), ops.operator_named(operator)
    implementation = found.implementations[backend]
    behind = {
        file_of_module(found.definition.__module__),
        *files_behind(implementation.forward),
        *files_behind(implementation.backward),
    }
    elsewhere = file_of_module("tilestack.kernels.optim.adamw")
    for changed in (*behind, elsewhere):
        monkeypatch.setattr(source, "code_of", lambda path: "x = 1" if path == changed else code_of(path))
        assert (source_hash(operator, backend) == before) == (changed == elsewhere), changed


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
    assert hashes[0] != hashes[1] == hashes[2]


def test_comments_of_cuda_sources_count_for_nothing(tmp_path):
    before, after, other = (tmp_path / name for name in ("before.cu", "after.cu", "other.cu"))
    before.write_text("// a sum\nint f(int x) { return x + 1; }  /* of\ntwo */\n")
    after.write_text("int f(int x) { return x + 1; }\n\n")
    other.write_text("int f(int x) { return x - 1; }\n")
    assert code_of(before) == code_of(after) != code_of(other)


def test_every_implementation_has_a_hash_and_different_files_differ():
    hashes = {(op.name, name): source_hash(op.name, name) for op in ops.operators() for name in op.implementations}
    assert all(len(found) == 16 for found in hashes.values())
    assert hashes["softmax", "triton"] != hashes["softmax", "torch"] != hashes["rms_norm", "torch"]
    assert hashes["softmax", "triton"] == hashes["log_softmax", "triton"]  # one file makes both
    assert source_hash("softmax", "compile") == hashes["softmax", "torch"]  # a peer runs the definition


def test_pytorch_has_no_file_of_ours():
    assert not files_behind(ops.operator_named("relu").implementations["aten"].forward)
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
