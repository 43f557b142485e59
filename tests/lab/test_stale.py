"""A row is of the present source, or is shown as older."""

import sys
from pathlib import Path

import pytest
from test_bench_train import WORK

from tilestack.lab import source, stale
from tilestack.lab.train_steps import step_of, write_weights
from tilestack.train import fp8


@pytest.fixture(autouse=True)
def _forget():
    yield
    for cached in (stale.present_source, stale.hash_of_parts):
        cached.cache_clear()


def test_a_row_is_current_while_its_hash_is_that_of_the_source():
    row = dict(op="softmax", backend="triton", source=stale.present_source("softmax", "triton"))
    assert stale.is_current(row)
    assert not stale.is_current(row | {"source": "0" * 16})
    assert not stale.is_current(dict(op="softmax", backend="triton")), "measured before rows had a hash"
    assert not stale.is_current(row | {"op": "no_such_operator"})
    assert not stale.is_current(row | {"backend": "removed", "source": ""})


def test_peers_have_no_source_of_ours():
    assert stale.present_source("softmax", "aten") == stale.present_source("adamw", "fused") == ""


@pytest.mark.parametrize(
    ("op", "changes_with", "is_left_by"),
    [
        ("adamw", "optim/adam.py", "kernels/softmax/rows.py"),
        ("train", "models/decoder.py", "models/gguf.py"),
        ("train", "train/fp8.py", "train/pretrain.py"),
        ("train", "train/fp8_head.py", "train/checkpoint.py"),
        ("train", "kernels/cuda/rms_norm.cu", "kernels/cpu/team.h"),
    ],
)
def test_optimizers_and_training_steps_follow_the_files_they_run(monkeypatch, op, changes_with, is_left_by):
    before = stale.present_source(op, "triton")
    for changed, same in ((is_left_by, True), (changes_with, False)):
        assert (stale.PACKAGE / changed).exists()
        monkeypatch.setattr(
            stale, "code_of", lambda path: "x = 1" if path == stale.PACKAGE / changed else source.code_of(path)
        )
        _clear()
        assert (stale.present_source(op, "triton") == before) is same


def _clear():
    stale.present_source.cache_clear()
    stale.hash_of_parts.cache_clear()


def test_every_part_named_is_there():
    assert all((stale.PACKAGE / part).exists() for part in (*stale.OF_A_TRAINING_STEP, *stale.OF_AN_OPTIMIZER))


@pytest.mark.parametrize("candidate", ["tilestack", "tilestack-graph", "tilestack-fp8-head"])
def test_a_training_step_runs_nothing_that_its_rows_do_not_follow(candidate, tmp_path, monkeypatch):
    """Else a row would be called current though what it measured has changed."""
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")  # the definitions compute it
    step, ran = step_of(candidate, write_weights(WORK, tmp_path)), set()
    step()
    sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
    try:
        step()
    finally:
        sys.setprofile(None)
    ours = {path for path in map(Path, ran) if path.is_relative_to(stale.PACKAGE)}
    measures = {path for path in ours if path.is_relative_to(stale.PACKAGE / "lab")}
    assert stale.PACKAGE / "train" / "step.py" in ours
    assert (stale.PACKAGE / "train" / "fp8_head.py" in ours) is (candidate == "tilestack-fp8-head")
    assert ours - measures <= stale.files_of_parts(stale.OF_A_TRAINING_STEP)
