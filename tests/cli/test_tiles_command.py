"""`tilestack tiles` as people run it."""

import json

import pytest

from tilestack.cli import main

MINE = """
import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + place, mask=place < n), tl.load(y_ptr + place, mask=place < n)
    tl.store(out_ptr + place, x + y, mask=place < n)


@implements(ops.add, backend="mine")
def add(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out
"""


@pytest.fixture
def tiles(tmp_path, monkeypatch, capsys, outside):
    """Runs the command in a folder of its own; answers exit code, output and errors."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["tiles", *arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def test_the_smallest_telling_case_is_shown_in_eighty_columns(tiles, tmp_path):
    code, out, _ = tiles("softmax")
    assert code == 0
    assert "softmax_fwd_kernel on 3 programs" in out
    assert "40 kB asked for, 1.00× what the operator has to move (40 kB)" in out
    assert max(map(len, out.splitlines())) <= 80
    page = tmp_path / "runs/tiles/softmax_triton_5x1000x-1_forward.html"
    assert str(page.relative_to(tmp_path)) in out
    assert "<title>softmax · triton · forward · 5×1000, dim -1 · float32</title>" in page.read_text()


def test_case_direction_layout_and_limits_are_as_asked(tiles, tmp_path):
    code, out, _ = tiles(
        "linear", "--backend", "triton_naive", "--case", "70x130x40xplain", "--direction", "backward", "--layout", "strided",
        "--programs", "1", "--dtype", "float16", "--output", "page.html", "--json", "-",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    asked = {name: found[name] for name in ("op", "backend", "case", "dtype", "direction", "layout", "page")}
    assert asked == dict(op="linear", backend="triton_naive", case="70x130x40xplain", dtype="float16", direction="backward", layout="strided", page="page.html")  # fmt: skip
    assert [launch["kernel"] for launch in found["launches"]] == ["matmul_naive_kernel"] * 2
    assert found["asked"] == sum(count["asked"] for count in found["counts"])
    assert "the first 1 of 2 programs" in (tmp_path / "page.html").read_text()


def test_a_users_own_file_is_shown_without_naming_its_backend(tiles, tmp_path):
    (tmp_path / "my_kernels.py").write_text(MINE)
    code, out, _ = tiles("add", "--load", "my_kernels.py")
    assert code == 0
    assert "add · mine · forward · 4×1025 · float32" in out
    assert "add_kernel on 5 programs" in out
    (tmp_path / "my_kernels.py").write_text(MINE.replace("x + y", "x + undefined").replace('"mine"', '"broken"'))
    code, out, _ = tiles("add", "--load", "my_kernels.py")
    assert code == 1
    assert "the call failed: NameError: name 'undefined' is not defined" in out
    assert "my_kernels.py:13" in out
    assert (tmp_path / "runs/tiles/add_broken_4x1025_forward.html").exists()


ENDLESS = """
import os
import signal

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def endless_kernel(x_ptr, out_ptr, n):
    while n > 0:
        tl.store(out_ptr, tl.load(x_ptr))
        if n == 7:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does


@implements(ops.copy, backend="endless")
def copy(x):
    open("calls.txt", "a").write("called ")
    out = torch.empty_like(x)
    endless_kernel[(1,)](x, out, 7)
    return out
"""


def test_a_file_that_ends_the_program_is_named(tiles, tmp_path):
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(0)\n")
    code, out, err = tiles("copy", "--load", "script.py")
    assert (code, out) == (1, "")
    assert "script.py:3: SystemExit: 0" in err


def test_one_interruption_ends_a_kernel_that_never_does(tiles, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    code, out, _ = tiles("copy", "--load", "endless.py")
    assert code == 1
    assert "the call failed: interrupted; the page shows what came before" in out
    (page,) = (tmp_path / "runs/tiles").iterdir()
    assert page.name in out
    assert (tmp_path / "calls.txt").read_text() == "called "  # and no other case is begun


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmacks"], "softmacks"),
        (["softmax", "--backend", "nobody"], "softmax has no nobody backend; it has torch, aten"),
        (["softmax", "--backend", "aten"], "softmax on aten launches no Triton kernel in its forward; backends in Triton: triton"),
        (["softmax", "--case", "9x9"], "softmax has no case '9x9'; small ones are 1x1x-1, 3x33x-1"),
        (["softmax", "--direction", "sideways"], "--direction is forward or backward, not 'sideways'"),
        (["softmax", "--layout", "round"], "--layout is one of plain, padded, ragged"),
        (["softmax", "--dtype", "int3"], "no dtype int3"),
        (["kv_write", "--direction", "backward"], "writes its arguments and has no backward"),
        (["linear", "--backend", "triton_persistent", "--dtype", "float32"], "x is float32, it takes float16, bfloat16"),
        (["softmax", "--output", "."], "is a folder; name a file"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_one_line_that_says_why(tiles, arguments, said):
    code, out, err = tiles(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_an_operator_whose_kernels_take_no_float32_is_shown_in_what_they_take(tiles):
    code, out, _ = tiles("linear", "--backend", "triton_persistent")
    assert code == 0
    assert "linear · triton_persistent · forward · 70 rows, 130 columns, inner 40 · float16" in out
    assert "descriptor load" in out
