"""Compiling C++ for this CPU on first use: once for any number of processes, whatever happened to those before, and where
it cannot be done, an error that says what to do, which an engine survives."""

import logging
import pwd
import signal
import time

import other_process
import pytest
import tiny_models as tiny

from tilestack.engine import Engine, EngineSettings
from tilestack.kernels.cpu import build
from tilestack.kernels.cuda.build import BuildError

pytestmark = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")

LOAD = "import sys; from pathlib import Path; from tilestack.kernels.cpu import build; build.SOURCES = Path(sys.argv[1]); print(build.library('answer.cpp', ANSWER='42').answer())"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with a small source; what is built of it is `built`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "sources"
    folder.mkdir()
    monkeypatch.setattr(build, "SOURCES", folder)
    (folder / "answer.cpp").write_text('extern "C" int answer() { return ANSWER; }')
    return folder


def answer(number=42):
    """What the source answers in this process, compiled anew or not."""
    return build.library.__wrapped__("answer.cpp", ANSWER=str(number)).answer()


def built(tmp_path):
    return sorted(tmp_path.joinpath("cache", "tilestack", "cpu").iterdir())


def compiler_that(tmp_path, does):
    """The path of a compiler that does something first."""
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\n{does}\nexec {build.compiler()[0]} "$@"\n')
    path.chmod(0o755)
    return str(path)


def process(sources, **environment):
    return other_process.started(LOAD, sources, **environment)


def test_what_does_not_compile_is_an_error_that_leaves_nothing(sources, tmp_path):
    with pytest.raises(BuildError, match=r"answer.cpp did not compile:[^$]*nothing_of_that_name"):
        answer("nothing_of_that_name")
    assert [path.suffix for path in built(tmp_path)] == [".lock"]


def test_a_changed_header_is_compiled_anew(sources):
    (sources / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return SAID; }')
    for said in (41, 42):
        (sources / "answer.h").write_text(f"#define SAID {said}")
        assert answer() == said


def test_another_cpu_has_code_of_its_own(sources, tmp_path, monkeypatch):
    """In a folder that several machines share."""
    assert answer() == 42
    monkeypatch.setattr(build, "cpu_kind", lambda: "x86_64 fpu sse2")
    assert answer() == 42
    assert len([path for path in built(tmp_path) if path.suffix == ".so"]) == 2


@pytest.mark.parametrize("asked", ["", " ", "{compiler} -DWITH='a b'", "env {compiler}"])
def test_compilers_are_named_as_elsewhere(sources, monkeypatch, asked):
    """Not at all, with flags, or behind another program."""
    monkeypatch.setenv("CXX", asked.format(compiler=build.compiler()[0]))
    assert not build.missing_compiler()
    assert answer() == 42


def test_what_cannot_be_loaded_is_built_again(sources, tmp_path):
    """Of a machine that went down before all was on the disk, or has other system libraries."""
    assert answer() == 42
    (made,) = [path for path in built(tmp_path) if path.suffix == ".so"]
    made.unlink()  # this process has it mapped
    made.write_bytes(b"\x7fELF cut short")
    with process(sources) as other:
        out, errors = other.communicate(timeout=300)
    assert out.split() == ["42"], errors


def test_two_processes_compile_once(sources, tmp_path):
    compiler = compiler_that(tmp_path, f"echo once >> {tmp_path}/count")
    both = [process(sources, CXX=compiler) for _ in range(2)]
    for each in both:
        out, errors = each.communicate(timeout=300)
        assert out.split() == ["42"], errors
    assert (tmp_path / "count").read_text().split() == ["once"]


@pytest.mark.parametrize("killed_by", [signal.SIGINT, signal.SIGKILL])
def test_after_a_build_is_killed_the_next_one_builds_and_tidies_up(sources, tmp_path, monkeypatch, killed_by):
    monkeypatch.setenv(
        "CXX", compiler_that(tmp_path, f"test -e {tmp_path}/began || (touch {tmp_path}/began; sleep 60)")
    )
    began = process(sources)
    while not (tmp_path / "began").exists():
        assert began.poll() is None, began.stderr.read()
        time.sleep(0.02)
    began.send_signal(killed_by)
    began.wait(timeout=60)
    assert began.returncode != 0
    assert answer() == 42
    assert [path.suffix for path in built(tmp_path)] == [".lock", ".so"]


def unwritable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def nobodys(tmp_path, monkeypatch):
    """A process whose user is in no list of users, as in containers."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])


def without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))


def full(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device")))


def not_executable(tmp_path, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda path: (_ for _ in ()).throw(OSError(f"{path}: Operation not permitted")))


@pytest.mark.parametrize("spoil", [unwritable, nobodys, without_locks, full, not_executable])
def test_a_cache_that_cannot_be_used_is_named_with_what_to_do(sources, tmp_path, monkeypatch, spoil):
    spoil(tmp_path, monkeypatch)
    with pytest.raises(BuildError, match=r"set XDG_CACHE_HOME to a folder that"):
        answer()


def not_compiling(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "CXX", compiler_that(tmp_path, "echo 'In a file: error: set XDG_CACHE_HOME' >&2; echo more >&2; exit 1")
    )


@pytest.mark.parametrize("spoil", [unwritable, nobodys, not_compiling])
def test_engines_serve_without_what_cannot_be_built_and_warn_in_a_line(tmp_path, monkeypatch, caplog, spoil):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tilestack.kernels.cpu.decode_step.library", build.library.__wrapped__)
    spoil(tmp_path, monkeypatch)
    caplog.set_level(logging.WARNING, "tilestack.engine.cpu_step")
    engine = Engine(tiny.ours("smollm2"), None, EngineSettings(context=32))
    assert engine.runner.step is None
    (said,) = caplog.messages
    assert said.startswith("decoding operator by operator, which is slower: ")
    assert "set XDG_CACHE_HOME" in said
    assert "\n" not in said
