"""`tilestack learn show`: a learner's kernel as a picture, right, empty, wrong or crashing."""

import json

import pytest

from tilestack.cli import main
from tilestack.cli.learn import load_attempt
from tilestack.lab.tiles.cases import record_call
from tilestack.lab.tiles.counts import counts_of
from tilestack.lab.tiles.page import page_data
from tilestack.learn.exercise import EXERCISES
from tilestack.learn.folder import Folder

SOFTMAX = EXERCISES["softmax"]


@pytest.fixture
def show(tmp_path, capsys, monkeypatch, outside):
    """Shows a text as the attempt at `softmax`, or what the exercise begins with; answers exit code, output and errors."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    mine = Folder(tmp_path / "mine")
    mine.start(SOFTMAX)

    def run(text=None, *options):
        if text:
            mine.attempt(SOFTMAX).write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["learn", "show", "softmax", "--folder", str(mine.path), *options])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    run.page = mine.path / "softmax.html"
    return run


def test_a_solution_is_shown_beside_the_learners_file(show):
    code, out, _ = show(SOFTMAX.solution())
    assert code == 0
    assert "softmax · mine · forward · 5×1000, dim -1 · float32" in out
    assert f"wrote {show.page}" in out
    assert "softmax_kernel" in show.page.read_text()


@pytest.mark.parametrize("name", EXERCISES)
def test_every_solution_can_be_shown(name, tmp_path, outside):
    exercise, path = EXERCISES[name], tmp_path / "solution.py"
    path.write_text(exercise.solution())
    recording = record_call(load_attempt(exercise, path), direction=exercise.direction)
    assert recording.error == ""
    counts = counts_of(recording)
    assert {count.kind for count in counts} >= {"load", "store"}
    assert not any(count.outside for count in counts)
    assert page_data(recording)["functions"][0]["lines"] != [""]


def test_a_kernel_that_is_still_empty_has_a_page_of_tensors_nobody_touched(show):
    code, out, _ = show()
    assert code == 0
    assert "0 B asked for" in out
    assert '"name":"out_ptr"' in show.page.read_text()
    assert "Yours: load row" in show.page.read_text()


def test_a_wrong_mask_is_shown_lane_by_lane(show):
    code, out, _ = show(
        SOFTMAX.solution().replace("mask=column < columns, other", "mask=column < WIDTH, other"), "--json", "-"
    )
    found = json.loads(out)
    assert code == 0
    (load,) = [count for count in found["counts"] if count["kind"] == "load"]
    assert load["outside"] == 24  # of the last row; the others end in the next
    assert load["times"] > 1


def test_a_kernel_that_crashes_midway_is_shown_up_to_there(show):
    broken = SOFTMAX.solution().replace("exponential / tl.sum(exponential, 0)", "exponentials / tl.sum(exponential, 0)")
    code, out, _ = show(broken, "--case", "3x33x-1")
    assert code == 1
    assert "the call failed: NameError: name 'exponentials' is not defined" in out
    assert "x_ptr   load" in out
    assert "Recorded is what came before" in show.page.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [("import torch\n", "registers no backend 'mine' for softmax"), ("x =\n", "softmax.py:1: SyntaxError")],
)
def test_a_file_that_cannot_be_run_is_one_line(show, text, said):
    code, out, err = show(text)
    assert (code, out) == (1, "")
    assert said in err
    assert not show.page.exists()
