"""Compiling on first use: once for any number of processes, whatever happened to those before. A C++ source stands in for
CUDA's, which needs a compiler of its own."""

import shutil
import signal
import time

import other_process
import pytest

from tilestack.kernels.cuda import build

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")), reason="compiling needs g++ and ninja, which are not here"
)

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'
LOAD = "import sys; from pathlib import Path; from tilestack.kernels.cuda import build; print(build.load_library(Path(sys.argv[1]), dict(ANSWER=42), '9.0').answer())"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "sources" / "answer.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def process(source, **environment):
    return other_process.started(LOAD, source, **environment)


def test_what_was_built_is_used_until_something_changes(source, monkeypatch, caplog):
    assert build.load_library(source, dict(ANSWER=1), "9.0").answer() == 1
    (told,) = [record.message for record in caplog.records if record.name == build.__name__]
    assert told == f"compiling answer.cpp, once for this GPU and PyTorch; it is kept in {build.cache_folder()}"
    caplog.clear()
    compiled = []
    with monkeypatch.context() as patched:
        patched.setattr(build, "compile_to", lambda built, *_: compiled.append(built))
        assert build.load_library(source, dict(ANSWER=1), "9.0").answer() == 1
        assert not compiled
        assert not caplog.records
        (source.parent / "part.cuh").write_text("// a header")
        changed = [(source, dict(ANSWER=1), "9.0"), (source, dict(ANSWER=2), "9.0"), (source, dict(ANSWER=2), "8.0")]
        for arguments in changed:
            with pytest.raises(OSError, match="cannot open shared object"):
                build.load_library(*arguments)
    assert len(set(compiled)) == 3
    assert {built.parent for built in compiled} == {build.cache_folder()}


def test_what_a_crash_of_the_machine_left_is_built_again(source):
    def answer():
        with process(source) as other:
            return other.communicate()[0].strip()

    assert answer() == "42"
    (built,) = build.cache_folder().glob("*.so")
    built.write_bytes(b"")
    assert answer() == "42"
    assert built.stat().st_size > 0


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"file/tilestack/cuda.* set XDG_CACHE_HOME to a folder"):
        build.load_library(source, dict(ANSWER=1), "9.0")


def test_what_does_not_compile_says_so_with_the_compilers_words(source):
    source.write_text("int f() { return nothing_of_that_name; }\n")
    for _ in range(2):  # and is not taken for whole afterwards
        with pytest.raises(build.BuildError, match=r"answer\.cpp did not compile[\s\S]*nothing_of_that_name"):
            build.load_library(source, {}, "9.0")


def test_two_processes_compile_once_and_a_lock_left_behind_stops_nobody(source, tmp_path):
    compiler = tmp_path / "counting-g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo once >> {tmp_path}/count;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    name = f"answer-{build.build_key(source, ['-DANSWER=42', *build.CUDA_FLAGS, '9.0', build.torch.__version__])}"
    left = build.cache_folder() / f"{name}.building" / "before"
    left.mkdir(parents=True)
    (left / "lock").touch()  # as PyTorch leaves it where a build was killed
    both = [process(source, CXX=str(compiler)) for _ in range(2)]
    for each in both:
        out, errors = each.communicate(timeout=300)
        assert out.split() == ["42"], errors
    assert (tmp_path / "count").read_text().split() == ["once"]
    assert sorted(path.name for path in build.cache_folder().iterdir()) == [f"{name}.lock", f"{name}.so"]


@pytest.mark.parametrize("killed_by", [signal.SIGINT, signal.SIGKILL])
def test_after_a_build_is_killed_the_next_one_builds(source, tmp_path, killed_by):
    compiler = tmp_path / "slow-g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) touch {tmp_path}/began; sleep 60;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    began = process(source, CXX=str(compiler))
    while not (tmp_path / "began").exists():
        assert began.poll() is None, began.stderr.read()
        time.sleep(0.02)
    began.send_signal(killed_by)
    began.communicate(timeout=60)
    assert began.returncode != 0
    assert build.load_library(source, dict(ANSWER=42), "9.0").answer() == 42
