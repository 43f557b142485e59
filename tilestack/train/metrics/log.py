"""What a run says of itself: `metrics.jsonl`, and how fast it went.

`metrics.jsonl` holds only what the run computed, a line per step, evaluation or sample; a resumed run cuts it back to its
checkpoint and goes on, so that the file of a run that was killed ten times equals that of one that was not. How fast it
went is another matter and goes to `speed.jsonl`.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilestack.train.errors import TrainingError

METRICS, SPEED = "metrics.jsonl", "speed.jsonl"


class Log:
    """A JSONL file that can be cut back."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = open(path, "ab")  # noqa: SIM115

    def write(self, **row: Any) -> None:
        self.file.write(json.dumps({name: finite(value) for name, value in row.items()}).encode() + b"\n")

    def flush(self) -> int:
        """Put everything on the disk; the length of the file."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as problem:
            raise TrainingError(
                f"cannot write {self.path}: {problem.strerror}. Make room; the same command goes on from the last checkpoint"
            ) from problem
        return self.file.tell()

    def cut(self, length: int) -> None:
        """Cut the file back to a length; one that is shorter has lost what it had, and is left as it is."""
        self.file.flush()
        if (found := os.fstat(self.file.fileno()).st_size) < length:
            raise TrainingError(
                f"{self.path} has {found:,} bytes where the checkpoint counts on {length:,}: it was cut or replaced. "
                "Put it back, or start the run over (--fresh)"
            )
        self.file.truncate(length)
        self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file; rows that find no room now were of no checkpoint, and a resumed run writes them again."""
        with suppress(OSError):
            self.file.close()


class NoLog(Log):
    """The log of a process that leaves it to another."""

    def __init__(self) -> None:
        pass

    def write(self, **row: Any) -> None:
        pass

    def flush(self) -> int:
        return 0

    def cut(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def finite(value: Any) -> Any:
    """The value, or as a text where JSON has no number for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def rows(folder: Path, name: str = METRICS) -> Iterator[dict[str, Any]]:
    """The rows of a run's file; a last line that is still being written is left out."""
    path = folder / name
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def curve(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """The steps and values of one metric of a run."""
    found = [(row["step"], float(row[name])) for row in rows(folder) if name in row]
    return [step for step, _ in found], [value for _, value in found]
