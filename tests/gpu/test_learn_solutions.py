"""The solutions of `tilestack learn` as a GPU compiles and runs them."""

import pytest

from tilestack.learn.exercise import EXERCISES
from tilestack.learn.folder import State
from tilestack.learn.grading import grade


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_a_solution_passes_everything(exercise, outside, tmp_path):
    path = tmp_path / f"{exercise.name}.py"
    path.write_text(exercise.solution(), encoding="utf-8")
    checked = grade(exercise, path, "cuda", True, lambda *_: None)
    assert checked.state is State.EVERYTHING, checked.wrong
