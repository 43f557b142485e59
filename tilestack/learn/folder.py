"""A learner's folder: attempts at exercises, and `progress.json`, which says what has passed.

    exercises/
    ├── add.py            the first attempt at `add`
    ├── add_2.py          another; the last one counts
    ├── add.html          what `show` has drawn of it
    └── progress.json     by exercise: what the file that has these bytes has passed, and how many hints were shown

A file that was edited since it passed has other bytes, and is a beginning again. Nothing that exists is ever overwritten but
`progress.json` and what `show` has drawn before.
"""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tilestack.files import alone_in, naming, write_text_whole
from tilestack.learn.exercise import Exercise

PROGRESS = "progress.json"


class State(StrEnum):
    """How far an exercise is."""

    NOT_BEGUN = "not begun"
    BEGUN = "begun"
    PASSES = "passes"
    EVERYTHING = "passes everything"

    @property
    def is_done(self) -> bool:
        return self in (State.PASSES, State.EVERYTHING)


@dataclass(frozen=True)
class Folder:
    """Where somebody's attempts are."""

    path: Path

    def attempts(self, exercise: Exercise) -> dict[int, Path]:
        """The files of an exercise by number, in their order."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file; name a folder for your exercises with --folder")
        numbered = re.compile(rf"{exercise.name}(?:_(\d+))?\.py")
        matches = [(numbered.fullmatch(path.name), path) for path in self.path.glob("*.py")]
        return dict(sorted((int(match[1] or 1), path) for match, path in matches if match))

    def attempt(self, exercise: Exercise) -> Path:
        """The file that counts, the last."""
        if not (found := self.attempts(exercise)):
            raise ValueError(
                f"there is no {exercise.name}.py in {self.path}; begin with: {self.command('start', exercise)}"
            )
        return found[max(found)]

    def start(self, exercise: Exercise, again: bool = False) -> Path:
        """Write the file that an exercise begins with, beside earlier ones where it is to begin `again`."""
        number = max(attempts := self.attempts(exercise), default=0) + 1
        if attempts and not again:
            raise ValueError(
                f"{attempts[number - 1]} is there already and stays as it is; --again begins another one beside it"
            )
        target = self.path / (f"{exercise.name}.py" if number == 1 else f"{exercise.name}_{number}.py")
        self.write_new(target, exercise.given(self.command("check", exercise)))
        return target

    def write_new(self, target: Path, text: str) -> None:
        """Write a file that must not exist yet, and after a full disk still does not: half of one would pass for an attempt."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with naming(target), target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def state(self, exercise: Exercise) -> State:
        if not self.attempts(exercise):
            return State.NOT_BEGUN
        known = self.progress().get(exercise.name, {})
        same = known.get("hash") == hash_of(self.attempt(exercise))
        return State(known["state"]) if same and known.get("state") in [*State] else State.BEGUN

    def hints_shown(self, exercise: Exercise) -> int:
        return self.progress().get(exercise.name, {}).get("hints", 0)

    def record(self, exercise: Exercise, **about: Any) -> None:
        """Remember something of an exercise."""
        with alone_in(self.path):
            progress = self.progress()
            progress[exercise.name] = progress.get(exercise.name, {}) | about
            write_text_whole(self.path / PROGRESS, json.dumps(progress, indent=1) + "\n")

    def progress(self) -> dict[str, dict[str, Any]]:
        """What is remembered, by exercise."""
        path = self.path / PROGRESS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(map(is_record, found.values())):
            raise ValueError(f"{path} is not what `tilestack learn` wrote; move it away, and check your files again")
        return found

    def command(self, verb: str, exercise: Exercise) -> str:
        """What to type for this folder."""
        where = "" if self == DEFAULT else f" --folder {shlex.quote(str(self.path))}"
        return f"tilestack learn {verb} {exercise.name}{where}"


DEFAULT = Folder(Path("exercises"))


def is_record(known: Any) -> bool:
    """Whether this is what is remembered of an exercise."""
    return isinstance(known, dict) and isinstance(hints := known.get("hints", 0), int) and hints >= 0


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
