"""Checking an attempt: in a process of its own, since a kernel may write over memory that is not its own, or never end.

    this process                          the other
    reads the file, finds syntax errors
    starts the other, waits      ───▶     loads PyTorch, the exercise and the attempt
    shows progress               ◀───     begins a claim, with a time limit: past it, it says where it is, and ends
    records what has passed      ◀───     all hold, or the first that is wrong, explained

PyTorch is imported there only, so that a misspelt name and a syntax error are answered at once. What an attempt prints goes
to standard error.
"""

import ast
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tilestack.lab.proof.child_process import start_without_ctrl_c
from tilestack.learn.exercise import Exercise
from tilestack.learn.finding import Finding, code_in
from tilestack.learn.folder import Folder, State, hash_of

Tell = Callable[[int, int], None]  # a claim is begun: its number, and how many there are


@dataclass(frozen=True)
class Checked:
    """What became of an attempt."""

    state: State
    proved: int = 0
    claims: int = 0
    wrong: Finding | None = None


def check(exercise: Exercise, folder: Folder, device: str, everything: bool, limit: float, tell: Tell) -> Checked:
    """Prove the present attempt at an exercise, and remember in its folder what passed."""
    path = folder.attempt(exercise)
    hash_before = hash_of(path)
    known = folder.state(exercise)
    if (problem := syntax_error(path)) is not None:
        checked = Checked(State.BEGUN, wrong=problem)
    else:
        checked = check_apart(exercise, path, device, everything, limit, tell)
    best = State.EVERYTHING if checked.wrong is None and known is State.EVERYTHING else checked.state
    folder.record(exercise, hash=hash_before, state=best)
    return checked


def syntax_error(path: Path) -> Finding | None:
    """What Python cannot read in a file."""
    try:
        ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        what = f"Python cannot read {path.name}: {error.msg}"
        return Finding(what, line=error.lineno, code=code_in(path, error.lineno))
    except ValueError as error:  # a byte of zero
        return Finding(f"Python cannot read {path.name}: {error}")
    return None


def check_apart(exercise: Exercise, path: Path, device: str, everything: bool, limit: float, tell: Tell) -> Checked:
    """Grade a file in another process; what kills that process is a finding, too."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as last_words:
        process = context.Process(
            target=check_in_process,
            args=(theirs, exercise, path, device, everything, limit, last_words.name),
            daemon=True,
        )
        start_without_ctrl_c(process)
        theirs.close()
        begun, count = 0, 0
        try:
            while not isinstance(said := ours.recv(), Checked):
                begun, count = said
                tell(begun, count)
            return said
        except EOFError:
            process.join()
            text = Path(last_words.name).read_text(encoding="utf-8", errors="replace")
            wrong = how_it_died(path, process.exitcode or 0, text, limit)
            return Checked(State.BEGUN, max(begun - 1, 0), count, wrong)
        finally:
            process.kill()
            process.join()


def how_it_died(path: Path, code: int, last_words: str, limit: float) -> Finding:
    """Why a process ended without an answer, and in which line of the file, from what `faulthandler` wrote."""
    name = str(path.absolute()).encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    found = re.search(rf'File "{re.escape(name)}", line (\d+)', last_words)
    line = int(found[1]) if found else None
    if last_words.startswith("Timeout"):
        what = f"it was still running after {limit:g} seconds in one case"
        advice = [
            "Does a loop never end? `while` needs something that changes; `range(0, columns, CHUNK)` ends by itself.",
            "If it is only slow, allow a case more time with --limit.",
        ]
    elif code < 0:
        what = f"it crashed the process ({signal.Signals(-code).name})"
        advice = ["It used memory that is not its own: look at the offsets and the mask of each `tl.store`."]
        if code == -signal.SIGKILL:
            advice = ["Somebody ended it, or the machine ran out of memory."]
    elif code != 1:  # of Python's own, where our check raises
        what, advice = f"it ended the process, with exit code {code}, before the check was done", []
    else:
        raise RuntimeError(f"the process that checks {path} ended with exit code {code} and no answer")
    return Finding(what, line=line, code=code_in(path, line), advice=advice)


def check_in_process(
    connection: Connection, exercise: Exercise, path: Path, device: str, everything: bool, limit: float, last_words: str
) -> None:
    """What the other process does."""
    os.dup2(2, 1)  # what an attempt prints is not the answer
    with open(last_words, "w") as file:
        faulthandler.enable(file)
        from tilestack.learn.grading import grade

        def begin(number: int, count: int) -> None:
            faulthandler.dump_traceback_later(limit, exit=True, file=file)
            connection.send((number, count))

        try:
            answer = grade(exercise, path.absolute(), device, everything, begin)
        except (SystemExit, KeyboardInterrupt) as end:  # Ctrl-C itself does not come here
            does = "calls `exit()`" if isinstance(end, SystemExit) else "raises KeyboardInterrupt"
            answer = Checked(State.BEGUN, wrong=Finding(f"it {does}, which ends the check with it"))
        connection.send(answer)
        faulthandler.cancel_dump_traceback_later()
