"""The hash of what was measured or proved: it follows the code that runs, and nothing else."""

import pytest

from tilestack import contract, ops
from tilestack.lab.source import KERNELS, code_of, file_of_module, files_behind, source_hash

CODE = '"""About it."""\nimport math  # why\n\n\ndef f(x):\n    """What."""\n    return x + 1\n'


def names_behind(operator, backend="triton"):
    return {path.name for path in files_behind(ops.operator_named(operator).implementations[backend].forward)}


def test_it_reaches_what_a_kernel_imports_by_way_of_others():
    assert {"activation_dropout.py", "dropout.py", "activation.py", "tiles.py"} <= names_behind("activation_dropout")
    assert "cross_entropy.py" not in names_behind("softmax")


def test_it_reaches_the_cuda_sources_that_a_file_names():
    assert {"softmax.py", "softmax.cu", "common.cuh", "build.py"} <= names_behind("softmax", "cuda")
    assert "add.cu" not in names_behind("softmax", "cuda")


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
    ],
)
def test_only_what_compiles_counts(tmp_path, old, new, same):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(CODE)
    after.write_text(CODE.replace(old, new))
    assert (code_of(before) == code_of(after)) is same


@pytest.mark.usefixtures("outside")
def test_a_backend_from_outside_is_hashed_by_its_own_file():
    contract.implements(ops.relu, backend="mine")(lambda x: x.clamp_min(0))
    assert source_hash("relu", "mine") not in (source_hash("relu", "torch"), source_hash("relu", "triton"))
