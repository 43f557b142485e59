"""The folder of a run: ours by its marker, of one command, and of one process at a time.

The marker is written into a new or empty folder by the first command that trains there, and locked while one does. A folder
that holds anything else, or the run of another command, is refused before anything is read or written.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilestack.files import (
    MARKER,
    ForeignFolder,
    clean_parts,
    contents,
    discard,
    read_marker,
    refuse_foreign,
    unused,
    write_marker,
)
from tilestack.train import metrics
from tilestack.train.errors import TrainingError

BEFORE = ".before"  # where a run is while another is to take its place
LOGS = (metrics.METRICS, metrics.SPEED)
LEFT = ("data", "adapter", "model")  # folders that a run replaces as a whole


class RunFolder:
    """Where a command trains. Nothing is written before it is `held`."""

    def __init__(self, path: Path | str, command: str = "train"):
        self.path, self.command = Path(path), command
        self._held = False
        self.refuse_others()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def refuse_others(self) -> None:
        """Refuse a folder that is not a run, or that of another command."""
        elsewhere = f"give it a folder of its own: {'--output' if self.command == 'demo' else '--folder'} NAME"
        if self.path.exists() and not self.path.is_dir():
            raise ForeignFolder(f"{self.path} is a file; {elsewhere}")
        about = read_marker(self.path)
        visible = [path for path in self.path.iterdir() if path.name[0] != "."] if self.path.is_dir() else []
        if about.get("command") == self.command or not (about or visible):
            return
        if about.get("command"):
            raise ForeignFolder(f"{self.path} is a run of `tilestack {about['command']}`; {elsewhere}")
        raise ForeignFolder(f"{self.path} is not a run ({contents(self.path)}); {elsewhere}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder; inside, it may be held again. One that nothing came of is removed."""
        if self._held:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / MARKER, "a") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(f"another process is training in {self.path}") from None
            self.refuse_others()  # it may have been someone else's by the time it was locked
            if not read_marker(self.path):
                write_marker(self.path, command=self.command)
            clean_parts(self.path)
            self.put_back()
            for name in LEFT:
                refuse_foreign(self.path / name)  # better now than when the training is done
            self._held = True
            try:
                yield
            finally:
                self._held = False
                if [path.name for path in self.path.iterdir()] == [MARKER]:
                    (self.path / MARKER).unlink()
                    self.path.rmdir()

    @contextmanager
    def starting_over(self) -> Iterator[None]:
        """Inside, the run's checkpoints and metrics are aside, so that it starts from nothing; they are removed at the end,
        and put back after an error. The model it made stays until the new one takes its place."""
        before = self.path / BEFORE
        before.mkdir(exist_ok=True)
        for made in (*self.path.glob("broken-step-*"), self.checkpoints, *(self.path / name for name in LOGS)):
            if made.exists():
                made.rename(before / made.name)
        try:
            yield
        except BaseException:
            self.put_back()
            raise
        for made in (*before.glob("checkpoints/step-*"), *before.glob("broken-step-*")):
            discard(made)
        for name in LOGS:
            (before / name).unlink(missing_ok=True)
        self.put_back()  # what is not ours

    def put_back(self) -> None:
        """Undo a start that did not come about, this process's or one's that was killed."""
        before = self.path / BEFORE
        for path in before.iterdir() if before.is_dir() else ():
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            else:
                path.rename(unused(self.path / path.name))
        if before.is_dir():
            before.rmdir()
