"""The threads of the CPU's step: every piece of work is done once and in its turn, however they are interrupted."""

import subprocess
from pathlib import Path

import pytest

from tilestack.kernels.cpu import build

pytestmark = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made = tmp_path_factory.mktemp("team") / "cpu_team"
    source = Path(__file__).with_name("cpu_team.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{build.SOURCES}"]
    subprocess.run([*build.compiler(), *flags, str(source), "-o", str(made)], check=True)
    return made


@pytest.mark.parametrize("what", ["callers", "forks", "limit", "hundreds"])
def test_every_piece_of_work_is_done_once_and_in_its_turn(program, what):
    """By callers with several numbers of threads, in processes forked beside a run, and where threads are few or very many."""
    assert subprocess.run([program, what], timeout=300).returncode == 0
