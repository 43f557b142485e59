"""The contract's C++: built when asked to and never else, found again, and done without."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import BackendError, autograd, backend, registry
from tilestack.contract.cases import Make
from tilestack.contract.native import build

DERIVED = [o.name for o in ops.operators() if callable(o.implementations.get("triton") and o.implementations["triton"].backward)]  # fmt: skip

CALL = """
import torch
from tilestack import ops, implements
from tilestack.contract import autograd, backend
implements(ops.relu, backend="mine", backward=lambda grad, out: grad * (out > 0))(torch.relu)
x = torch.tensor([-1.0, 2.0], requires_grad=True)
with backend("mine"):
    out = ops.relu(x)
out.sum().backward()
assert x.grad.tolist() == [0, 1]
print(type(out.grad_fn).__module__)
"""


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A cache of the test's own, with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.VARIABLE, raising=False)
    build.place_of_build.cache_clear()
    build.native_node.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    build.place_of_build.cache_clear()
    build.native_node.cache_clear()


@pytest.fixture
def compiler(elsewhere, monkeypatch, node):
    """One that takes a second to copy what was compiled before, and counts how often it ran."""
    monkeypatch.undo()
    build.place_of_build.cache_clear()
    made = build.place_of_build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    build.place_of_build.cache_clear()
    script = elsewhere / "compiler"
    script.write_text(f'#!/bin/sh\necho ran >> {elsewhere}/ran\nsleep 1\nfor out; do :; done\ncp {made} "$out"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return elsewhere / "ran"


def run(text, **environment):
    there = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=there, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", DERIVED)
def test_gradients_have_the_bits_they_have_through_python(name, node, monkeypatch):
    """Of every operator with a kernel for its backward, on its smallest case."""
    op = ops.operator_named(name)
    sizes = lambda case: sum(t.numel() for t in op.given_tensors(op.bind(**case.build(Make(device="meta")))).values())
    case = min((c for c in op.cases if c.kind == "check" and sizes(c)), key=sizes)
    given = op.bind(**case.build(Make()))
    wanted = {n: v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}
    leaves = [value for value in wanted.values() if isinstance(value, Tensor) and value.requires_grad]

    def gradients(module):
        monkeypatch.setattr(autograd, "native_node", lambda: module)
        registry.forget_plans()
        with backend("triton"):
            try:
                results = op(*[v.clone() if n in op.consumes else v for n, v in wanted.items()])
            except BackendError as reason:
                pytest.skip(str(reason))
        outs = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        assert all((type(o.grad_fn).__module__ == "tilestack_node") == (module is not None) for o in outs)
        return torch.autograd.grad(outs, leaves, [torch.full_like(o, 0.5) for o in outs], allow_unused=True)

    for ours, plain in zip(gradients(node), gradients(None), strict=True):
        assert (ours is None) == (plain is None)
        if ours is not None:
            torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)


def test_neither_import_nor_call_builds_anything(tmp_path):
    found = run(CALL, XDG_CACHE_HOME=str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "torch.autograd.function"
    assert not (tmp_path / "tilestack").exists()
    assert "gradients" not in found.stderr


@pytest.mark.parametrize(("wish", "module"), [("", "tilestack_node"), ("0", "torch.autograd.function")])
def test_a_call_takes_what_is_built_unless_it_is_turned_off(node, wish, module):
    found = run(CALL, TILESTACK_NATIVE=wish)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == module


def test_what_does_not_load_is_told_once_and_done_without(elsewhere, caplog):
    build.place_of_build().parent.mkdir(parents=True)
    build.place_of_build().write_bytes(b"half of a libr")
    assert build.native_node() is None
    assert build.native_node() is None
    assert [record.message[:24] for record in caplog.records] == ["calls go through Python,"]


def test_a_library_cut_short_is_built_again(compiler):
    build.place_of_build().parent.mkdir(parents=True)
    build.place_of_build().write_bytes(b"half of a libr")
    build.build_node()
    assert compiler.read_text().count("ran") == 1
    assert build.native_node().Pair


def test_processes_that_build_at_the_same_time_build_once(compiler):
    text = "from tilestack.contract.native.build import build_node, native_node; build_node(); native_node().Pair"
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, [text] * 3))
    assert [each.returncode for each in found] == [0, 0, 0], found
    assert compiler.read_text().count("ran") == 1
    assert [path.name for path in build.place_of_build().parent.iterdir()] == [build.place_of_build().name]


def test_another_source_pytorch_or_python_is_another_build(elsewhere, monkeypatch):
    names = set()
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr(torch, "__version__", "2.99.0"),
        lambda: monkeypatch.setattr(build.sysconfig, "get_config_var", lambda name: "cpython-399"),
        lambda: monkeypatch.setattr(build, "SOURCE", elsewhere / "node.cpp"),
        lambda: monkeypatch.setattr(build, "FLAGS", ("-O3",)),
    ):
        (elsewhere / "node.cpp").write_text("another")
        change()
        build.place_of_build.cache_clear()
        names.add(build.place_of_build().name)
    assert len(names) == 5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-compiler", "node.cpp cannot be compiled: there is no no-such-compiler to compile it"),
        ("false", "node.cpp did not compile"),
        ("true", "compiled and cannot be loaded"),
    ],
)
def test_what_cannot_be_built_is_said(elsewhere, monkeypatch, command, message):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(build.NodeBuildError, match=message):
        build.build_node()
    assert not build.place_of_build().exists()
    assert build.native_node() is None


def test_a_cache_that_cannot_be_written_is_said(elsewhere, monkeypatch):
    if build.missing_for_build():
        pytest.skip(build.missing_for_build())
    (elsewhere / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "file"))
    build.place_of_build.cache_clear()
    with pytest.raises(build.NodeBuildError, match=r"there is no place for what is compiled.*XDG_CACHE_HOME"):
        build.build_node()


def test_without_a_home_gradients_go_through_python(elsewhere, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", homeless)
    assert build.native_node() is None
    if not build.missing_for_build():
        with pytest.raises(build.NodeBuildError, match=r"home directory.*XDG_CACHE_HOME"):
            build.build_node()
