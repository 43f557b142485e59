"""A learner's folder: nothing of theirs is overwritten, and what passed is remembered for just those bytes."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from tilestack.cli import learn as command_line
from tilestack.cli import main
from tilestack.learn.exercise import EXERCISES, find_exercise
from tilestack.learn.folder import PROGRESS, Folder, State, hash_of

ADD = EXERCISES["add"]


@pytest.fixture
def mine(tmp_path):
    return Folder(tmp_path / "mine")


@pytest.fixture
def learn(mine, capsys):
    """Runs `tilestack learn …` on the folder; answers exit code, output and errors."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["learn", *words, "--folder", str(mine.path)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_beginning_overwrites_nothing(mine, learn):
    code, out, _ = learn("start", "add")
    assert code == 0
    assert f"tilestack learn check add --folder {mine.path}" in out.replace("\n", "")
    first = mine.path / "add.py"
    first.write_text("precious")
    code, _, error = learn("start", "add")
    assert code == 1
    assert error.startswith(f"error: {first} is there already")
    for number in (2, 3):
        assert learn("start", "add", "--again")[0] == 0
        assert mine.attempt(ADD) == mine.path / f"add_{number}.py"
    assert first.read_text() == "precious"
    assert learn("solution", "add", "--write")[0] == 0
    written = mine.path / "add_solution.py"
    assert written.read_text() == ADD.solution()
    assert learn("solution", "add", "--write")[0] == 1
    assert mine.attempt(ADD).name == "add_3.py"  # a solution is no attempt


def test_a_file_that_was_edited_is_a_beginning_again(mine):
    assert mine.state(ADD) is State.NOT_BEGUN
    path = mine.start(ADD)
    assert mine.state(ADD) is State.BEGUN
    mine.record(ADD, hash=hash_of(path), state=State.PASSES)
    assert mine.state(ADD) is State.PASSES
    assert mine.state(EXERCISES["relu"]) is State.NOT_BEGUN
    path.write_text(path.read_text() + "# better\n")
    assert mine.state(ADD) is State.BEGUN
    mine.record(ADD, hints=1)
    assert mine.progress()["add"].keys() == {"hash", "state", "hints"}


def test_the_list_shows_how_far_one_is_and_what_is_next(mine, learn):
    assert "next: tilestack learn start add" in learn()[1]
    path = mine.start(ADD)
    assert f"next: edit {path}, then tilestack learn check add" in learn()[1]
    mine.record(ADD, hash=hash_of(path), state=State.EVERYTHING)
    code, out, _ = learn("--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == [*EXERCISES]
    assert rows[0] | {"file": str(path), "state": "passes everything", "hints_shown": 0} == rows[0]
    assert {row["state"] for row in rows[1:]} == {"not begun"}
    assert "next: tilestack learn start relu" in learn()[1]
    for exercise in EXERCISES.values():
        if exercise is not ADD:
            mine.record(exercise, hash=hash_of(mine.start(exercise)), state=State.PASSES)
    assert "All pass. next: tilestack learn check relu" in learn()[1]


def test_names_are_whole_on_a_narrow_terminal(learn, monkeypatch):
    monkeypatch.setattr(command_line.console, "width", 40)
    out = learn()[1]
    assert all(name in out for name in EXERCISES)


def test_a_full_disk_leaves_no_beginning_that_passes_for_an_attempt(mine, monkeypatch):
    def full(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    begin = Path.open

    def opened(path, *arguments, **options):
        file = begin(path, *arguments, **options)
        file.write = full
        return file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match=r"No space left on device: '.*add.py'"):
        mine.start(ADD)
    assert mine.state(ADD) is State.NOT_BEGUN


def test_hints_come_one_by_one_and_then_all_again(mine, learn):
    assert learn("hint", "add")[0] == 1  # before it is begun there is nothing to hint at
    mine.start(ADD)
    shown = lambda: re.findall(r"hint (\d) of 3", learn("hint", "add")[1])
    assert [shown(), shown(), shown()] == [["1"], ["2"], ["3"]]
    assert shown() == ["1", "2", "3"]
    assert "tilestack learn solution add" in learn("hint", "add")[1]
    assert mine.hints_shown(ADD) == len(ADD.hints)


def test_a_solution_is_printed_with_a_word_of_warning(learn, mine):
    mine.start(ADD)
    code, out, error = learn("solution", "add")
    assert (code, out.rstrip()) == (0, ADD.solution().rstrip())
    assert "3 hints are left" in error
    mine.record(ADD, hash=hash_of(mine.attempt(ADD)), state=State.PASSES)
    assert learn("solution", "add")[2] == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "relu"), "there is no relu.py in"),
        (("start", "transpos"), "there is no exercise 'transpos'; did you mean transpose?"),
        (("start", "zzz"), "there are add, relu"),
        (("compare", "relu"), "there is no relu.py in"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words, said, learn):
    code, _, error = learn(*words)
    assert code == 1
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_that_is_something_else_is_refused(mine, learn):
    mine.path.write_text("a file")
    assert "is a file; name a folder" in learn("start", "add")[2]
    mine.path.unlink()
    mine.start(ADD)
    for text in ("not JSON", "[]", '{"add": 1}', '{"add": {"hints": -1}}', '{"add": {"hints": "2"}}'):
        (mine.path / PROGRESS).write_text(text)
        assert f"{PROGRESS} is not what `tilestack learn` wrote" in learn()[2].replace("\n", " ")
        assert (mine.path / PROGRESS).read_text() == text


def test_options_belong_behind_the_command(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["learn", "--folder", str(tmp_path), "start", "add"])
    assert "write options behind the command: tilestack learn start" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_commands_can_be_copied_whatever_the_folder_is_called(tmp_path):
    assert Folder(tmp_path / "my exercises").command("check", ADD).endswith(f"--folder '{tmp_path}/my exercises'")


def test_the_name_of_a_file_will_do():
    assert find_exercise("add.py") is ADD
