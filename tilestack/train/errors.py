"""How a run ends before its last step."""

import signal
from pathlib import Path


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says at which step and what was saved."""


AFTER_A_LOSS = "the same command goes on from the last checkpoint"  # of a process


class Interrupted(Exception):
    """A run that was asked to stop, and has saved; `code` is what its process ends with."""

    def __init__(self, folder: Path, step: int, number: int):
        self.code = 128 + number
        name = signal.Signals(number).name
        kept = f"saved in {folder}" if step else "there was nothing to save"
        super().__init__(f"{name} after step {step}: {kept}; run the same command again to continue")
