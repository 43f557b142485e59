"""MPS around processes that share a GPU, played by a program of its name."""

import os
from pathlib import Path

import pytest

from tilestack.lab.proof.shared_gpu import CONTROL, PLACES, shared_gpu

PROGRAM = """#!/bin/sh
echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {code}
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch):
    def install(code: int) -> Path:
        program, log = tmp_path / CONTROL, tmp_path / "log"
        program.write_text(PROGRAM.format(log=log, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        for place in PLACES:
            monkeypatch.delenv(place, raising=False)
        return log

    return install


def places():
    return [os.environ.get(place) for place in PLACES]


def test_it_is_started_and_ended_whatever_happens_inside(control):
    log = control(0)
    found = []

    def fails_inside():
        with shared_gpu():
            found.append(os.environ[PLACES[0]])
            assert Path(found[0]).is_dir()
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    (folder,) = found
    assert [line.split() for line in log.read_text().splitlines()] == [["-d", folder], ["quit", folder]]
    assert places() == [None, None]
    assert not Path(folder).exists()


def test_where_it_does_not_start_nothing_is_different(control):
    log = control(1)
    with shared_gpu():
        assert places() == [None, None]
    assert len(log.read_text().splitlines()) == 1


def test_one_that_somebody_has_set_up_is_left_alone(control, monkeypatch):
    log = control(0)
    monkeypatch.setenv(PLACES[0], "/mine")
    with shared_gpu():
        assert places() == ["/mine", None]
    assert not log.exists()
