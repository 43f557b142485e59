"""The mutants are what they say, are tried without harm, and a sample of them is caught."""

import ast
import sys
import threading
import time
from dataclasses import replace

import pytest
from beside import BESIDE, TESTS, first_failure

from tilestack import ops
from tilestack.lab.mutation import record
from tilestack.lab.mutation.mutants import KINDS, Mutant, mutants_of
from tilestack.lab.mutation.suite import (
    Original,
    Outcome,
    Suite,
    all_claims,
    dependents_of,
    kernel_modules,
    module_of,
    operators_behind,
)
from tilestack.lab.source import file_of_module

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, out_ptr, n, x_stride, y_stride, BLOCK: tl.constexpr):
    \"\"\"1 + 1\"\"\"
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < n) & (lane >= 0)
    x = tl.load(x_ptr + lane * x_stride, mask=inside, other=0)
    total = x
    total += x / 2.0
    tl.store(out_ptr + lane, total, mask=inside)


def add(x):
    out = launch(add_kernel, (1,), x, out, x.stride(0), num_warps=4)
    return x.contiguous() * 2
"""
EXPECTED = {
    ("stride", "x_stride", "y_stride"),
    ("mask", "(lane < n) & (lane >= 0)", "lane < n"),
    ("mask", "inside", "(inside) | True"),
    ("comparison", "lane < n", "lane <= n"),
    ("constant", "0", "1"),
    ("constant", "2.0", "2.02"),
    ("scale", "x / 2.0", "(x)"),
    ("term", "total += x / 2.0", "total = x / 2.0"),
    ("argument", "x, out", "out, x"),
    ("argument", "x.contiguous()", "x"),
    ("stride", "x.stride(0)", "x.shape[-1]"),
    ("scale", "x.contiguous() * 2", "(x.contiguous())"),
}


def test_one_thing_is_wrong_in_each(tmp_path):
    path = tmp_path / "add.py"
    path.write_text(KERNEL)
    found = mutants_of("add", path)
    changes = {(m.kind, m.before, m.after) for m in found}
    assert changes >= EXPECTED
    assert {kind for kind, _, _ in changes} == set(KINDS)
    assert not [m for m in found if "warps" in m.before or "1 + 1" in m.before]
    assert len({m.name for m in found}) == len(found)
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source != KERNEL
        assert len(mutant.source.splitlines()) == len(KERNEL.splitlines())


def test_what_imports_a_mutant_is_executed_again_after_it():
    assert "tilestack.kernels.norm.rows" in dependents_of("tilestack.kernels.memory.columns")
    everything = dependents_of("tilestack.kernels.tiles")
    assert everything.index("tilestack.kernels.memory.columns") < everything.index("tilestack.kernels.norm.rows")
    assert len(everything) < len(kernel_modules())


def suite_of(file):
    """A file with the operators that lie in it."""
    module = f"tilestack.kernels.{file}"
    return Suite(module, tried=[op for op in operators_behind(module) if module_of(op) == module], seconds=2)


@pytest.fixture(scope="module")
def vectors():
    return suite_of("elementwise.vectors")


def broken(suite, old, new):
    source = suite.path.read_text()
    assert old in source
    return Mutant(suite.module, "", "", old, new, 1, 0, source.replace(old, new, 1))


def test_the_original_survives_and_a_crash_is_a_catch(vectors):
    before = vectors.path.read_bytes()
    assert not vectors.outcome(Mutant(vectors.module, "", "", "", "", 1, 0, before.decode())).caught
    died = vectors.outcome(broken(vectors, "def ", "import os; os.abort()\n\n\ndef "))
    assert died.caught
    assert "SIGABRT" in died.message
    assert "SyntaxError" in vectors.outcome(broken(vectors, "def ", "def def ")).message
    assert vectors.path.read_bytes() == before == file_of_module(vectors.module).read_bytes()


def test_only_claims_that_reach_a_mutant_are_tried(vectors):
    """A store that axpy alone runs is tried on axpy alone, and its lines are those of the file."""
    mutant = next(m for m in vectors.mutants() if m.function == "axpy" and m.kind == "argument")
    reaching = {look.claim.operator.name for look in vectors.looks if look.reaches(vectors.path, mutant.statement)}
    assert reaching == {"axpy"}
    assert mutant.line in mutant.statement


def test_a_file_that_takes_halves_alone_is_reached(monkeypatch):
    """`attention_int8` takes no float32, so no first look is to be had of it."""
    suite = Suite("tilestack.kernels.attention.quantised", tried=[ops.operator_named("attention_int8")], seconds=2)
    every = all_claims(suite.operators[0])
    some = [claim for claim in every if claim.variant == "plain" and claim.case.name == "2x9x9x4x2x16x16xcausal"]
    monkeypatch.setattr(suite.original, "claims_of", lambda operator: some)
    assert suite.looks
    mutant = next(m for m in suite.mutants() if m.before == "q_scale * FACTOR")
    assert suite.outcome(mutant).caught


def test_what_only_a_gpu_reaches_is_tried_as_if_it_were_one(monkeypatch):
    """In the interpreter two sums are two sums; on a GPU they may be one reduction, whose step a mutant gets wrong."""
    suite = Suite("tilestack.kernels.tiles", tried=[ops.operator_named("rms_norm")])
    monkeypatch.setattr(
        suite.original, "claims_of", lambda operator: [c for c in all_claims(operator) if c.case.name == "1x8192"]
    )
    mutant = next(m for m in suite.mutants() if m.name.endswith("add_two: b + d → (b)"))
    assert suite.looks
    assert not suite.reaching(suite.looks, mutant)
    outcome = suite.outcome(mutant)
    assert outcome.caught
    assert "rms_norm" in outcome.message


def test_what_is_kept_goes_on_and_tries_survivors_again(tmp_path):
    mutants = [Mutant("tilestack.kernels.tiles", "f", "mask", "a", "b", number, 1, "") for number in (1, 2, 3)]
    found = record.Tried("hash", mutants=3)
    found.add(Outcome(mutants[0], True, "wrong"))
    found.add(Outcome(mutants[1], False, "", claims=7))
    record.save_tried("tiles", found, tmp_path)
    kept = record.load_tried(tmp_path)["tiles"]
    assert (kept.tried, kept.caught, kept.survivors) == (2, {"mask": [1, 2]}, {mutants[1].name: 7})
    kept.add(Outcome(mutants[1], True, "wrong"))
    assert (kept.tried, kept.caught, kept.survivors) == (2, {"mask": [2, 2]}, {})


def test_what_a_test_beside_the_proofs_catches_is_caught_and_counted_apart(vectors, tmp_path):
    """In a child of its own too, in which the test calls the mutant."""
    path = tmp_path / "test_of_axpy.py"
    path.write_text(
        "import torch\nfrom tilestack.kernels.elementwise import vectors\n"
        "def test_scaled():\n    assert vectors.axpy(torch.ones(3), torch.zeros(3), 2.0).tolist() == [2.0] * 3\n"
    )
    refute = lambda: first_failure([str(path)])
    mutant = next(m for m in vectors.mutants() if m.function == "axpy" and m.kind == "argument")
    assert not vectors.tried_on(refute, broken(vectors, "def ", "def "), seconds=60).caught
    outcome = vectors.tried_on(refute, mutant, claims=7, seconds=60)
    assert outcome.message.endswith("test_of_axpy.py::test_scaled")
    found = record.Tried("hash", mutants=1)
    found.add(replace(outcome, caught=False))
    found.add(outcome, by_test=True)
    record.save_tried("tiles", found, tmp_path)
    kept = record.load_tried(tmp_path)["tiles"]
    assert (kept.tried, kept.survivors, kept.by_tests) == (1, {}, {mutant.name: outcome.message})


def test_tests_beside_the_proofs_are_there():
    for file, tests in BESIDE.items():
        assert record.code_hash(file), file
        for test in tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (TESTS / path).read_text() if name else (TESTS / path).exists()


def test_files_that_are_no_more_are_forgotten(tmp_path):
    gone, here = record.Tried("hash", mutants=1), record.Tried("hash", mutants=2)
    for file, found in {"once.there": gone, "tiles": here}.items():
        record.save_tried(file, found, tmp_path)
    assert record.load_tried(tmp_path) == {"tiles": here}


def test_what_is_kept_waits_for_others_who_keep(tmp_path):
    """Two processes that try different files must not write over each other's outcomes."""
    found = record.Tried("hash", mutants=1)
    other = threading.Thread(target=record.save_tried, args=("tiles", found, tmp_path))
    with record.alone_in(tmp_path):
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert not record.load_tried(tmp_path)
    other.join()
    assert record.load_tried(tmp_path) == {"tiles": found}


def test_a_definition_is_neither_noted_nor_counted(vectors):
    """Children inherit its results, so what a claim costs them, and where it leads, is the kernel's part alone."""
    original, tracers = Original(), []

    def slow_standards(*what):
        tracers.append(sys.gettrace())
        start = time.process_time()
        while time.process_time() < start + 1:
            pass
        return vectors.original.standards(*what)

    original.standards = slow_standards
    look = original.look_at(vectors.looks[0].claim)
    assert str(vectors.path) in look.lines
    assert look.seconds < 1
    assert tracers == [sys.gettrace()]


@pytest.mark.parametrize("file", ["elementwise.vectors", "softmax.rows", "loss.cross_entropy"])
def test_a_sample_is_caught(file):
    """Five mutants of each of these files; `python -m tests.mutation` tries all mutants of all files."""
    suite = suite_of(file)
    outcomes = [suite.outcome(mutant) for mutant in suite.mutants(5)]
    assert {o.mutant.name for o in outcomes if not o.caught} <= record.reasons().keys()
