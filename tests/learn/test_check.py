"""`tilestack learn check` as people run it: what it prints and records, and attempts that crash, hang or are interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilestack.cli import main
from tilestack.learn import check as checking
from tilestack.learn.check import Checked, syntax_error
from tilestack.learn.exercise import EXERCISES
from tilestack.learn.finding import Finding
from tilestack.learn.folder import Folder, State, hash_of

ADD = EXERCISES["add"]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def mine(tmp_path):
    folder = Folder(tmp_path / "mine")
    folder.start(ADD)
    return folder


@pytest.fixture
def check(mine, capsys, monkeypatch):
    """Checks a text as the attempt at `add`; answers exit code and output."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the command sets for good, owning its process

    def run(text, *options):
        mine.attempt(ADD).write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["learn", "check", "add", "--folder", str(mine.path), "--device", "cpu", *options])
        return ended.value.code, capsys.readouterr().out

    return run


def test_a_right_kernel_passes_and_a_wrong_one_is_explained(mine, check):
    code, out = check(ADD.solution() + "print('loaded')\n", "--json")
    answer = json.loads(out)  # what the attempt prints goes elsewhere
    assert code == 0
    assert (answer["passed"], answer["state"], answer["proved"]) == (True, "passes", answer["claims"])
    assert mine.state(ADD) is State.PASSES
    code, out = check(ADD.solution().replace("x + y, mask", "x - y, mask"))
    assert code == 1
    assert mine.state(ADD) is State.BEGUN
    said = " ".join(out.split())
    for part in (
        "add is not right yet",
        "add(x [1], y [1]) forward, float32",
        "place yours right",
        "[0]",
        "subtracted",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("known", "wrong", "recorded"),
    [
        (State.EVERYTHING, None, State.EVERYTHING),  # of all that passed, this was a part
        (State.EVERYTHING, Finding("it crashed"), State.BEGUN),
        (State.BEGUN, None, State.PASSES),
    ],
)
def test_what_is_remembered_is_the_most_that_these_bytes_have_passed(mine, monkeypatch, known, wrong, recorded):
    path = mine.attempt(ADD)
    mine.record(ADD, hash=hash_of(path), state=known)
    found = Checked(State.PASSES if wrong is None else State.BEGUN, wrong=wrong)
    monkeypatch.setattr(checking, "check_apart", lambda *_: found)
    checking.check(ADD, mine, "cpu", False, 60, lambda *_: None)
    assert mine.state(ADD) is recorded


def test_what_was_edited_while_it_was_checked_has_passed_nothing(mine, monkeypatch):
    monkeypatch.setattr(
        checking, "check_apart", lambda _, path, *__: path.write_text("x = 1") and Checked(State.PASSES)
    )
    checking.check(ADD, mine, "cpu", False, 60, lambda *_: None)
    assert mine.state(ADD) is State.BEGUN


def test_a_syntax_error_is_found_without_running_anything(mine, check, monkeypatch):
    monkeypatch.setattr("tilestack.learn.check.check_apart", None)
    code, out = check("def f(:\n    pass\n")
    assert code == 1
    assert "Python cannot read add.py" in out
    assert f"  {mine.attempt(ADD)}:1    def f(:\n" in out  # in one piece, however long
    mine.attempt(ADD).write_bytes(b"x = 1\0")
    assert "Python cannot read" in syntax_error(mine.attempt(ADD)).what


def test_what_never_ends_is_ended_and_its_line_told(mine, check):
    code, out = check("import torch\nwhile True:\n    torch = torch\n", "--limit", "1", "--json")
    wrong = json.loads(out)["wrong"]
    assert code == 1
    assert wrong["what"] == "it was still running after 1 seconds in one case"
    assert wrong["line"] in (2, 3)
    assert "loop" in wrong["advice"][0]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit", "it calls `exit()`, which ends the check with it"),
        ("raise KeyboardInterrupt", "it raises KeyboardInterrupt, which ends the check with it"),
        ("import os; os._exit(0)", "it ended the process, with exit code 0, before the check was done"),
    ],
)
def test_what_ends_the_check_is_told(check, code, said):
    failed, out = check(code, "--json")
    assert failed == 1
    assert json.loads(out)["wrong"]["what"] == said


def test_what_crashes_the_process_is_told_with_its_line(mine, check):
    code, out = check("import os, signal\n\nos.kill(os.getpid(), signal.SIGSEGV)\n", "--json")
    wrong = json.loads(out)["wrong"]
    assert code == 1
    assert wrong["what"] == "it crashed the process (SIGSEGV)"
    assert (wrong["line"], wrong["code"]) == (3, "os.kill(os.getpid(), signal.SIGSEGV)")


def test_the_line_of_a_crash_is_told_in_a_folder_of_any_name(mine, tmp_path):
    path = tmp_path / "Übung 1 習" / "add.py"
    path.parent.mkdir()
    path.write_text("x = 1\ny = 2\n")
    with (tmp_path / "last_words").open("w+") as file:
        code = compile("import faulthandler\nfaulthandler.dump_traceback(file)", str(path.absolute()), "exec")
        exec(code, {"file": file})
        file.seek(0)
        assert checking.how_it_died(path, -signal.SIGSEGV, file.read(), 60).line == 2


def test_ctrl_c_ends_both_processes(mine):
    attempt = "import os, sys\nprint('here', os.getpid(), file=sys.stderr, flush=True)\nwhile True:\n    pass\n"
    mine.attempt(ADD).write_text(attempt)
    running = subprocess.Popen(
        [sys.executable, "-m", "tilestack", "learn", "check", "add", "--folder", str(mine.path), "--device", "cpu"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        line = next(line for line in running.stderr if line.startswith("here"))
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)
        assert "Traceback" not in running.stderr.read()
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
    assert mine.state(ADD) is State.BEGUN


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compare on")
def test_comparing_needs_a_gpu(mine, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["learn", "compare", "add", "--folder", str(mine.path)])
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err == "error: compare times kernels and needs a GPU, which is not here; check needs none\n"
    )
