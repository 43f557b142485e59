"""A run for a process of its own, to be killed from outside, or in the middle of a save."""

import os
import signal
import time
from pathlib import Path

import torch
import torch._dynamo
from tiny import Counting, TinyModel, recipe

from tilestack.train import Trainer, checkpoint


class Slow(Counting):
    def next_batch(self):
        time.sleep(0.01)  # so that there are moments to be killed at
        return super().next_batch()


def die_while_saving(step: int) -> None:
    """Be killed when some of the files of a checkpoint are written and others are not."""
    write = checkpoint.save_file

    def fatal(tensors, path):
        write(tensors, path)
        if f"step-{step:06d}" in str(path) and "optimizer" in path.name:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = fatal


def never_save(step: int) -> None:
    """Wait in the save of a step to be killed, however late that comes."""
    write = checkpoint.save_file

    def endless(tensors, path):
        while f"step-{step:06d}" in str(path):
            time.sleep(1)
        write(tensors, path)

    checkpoint.save_file = endless


def train(folder: Path, dies_at: int | None, ends: bool) -> None:
    torch.set_num_threads(1)
    if dies_at is not None:
        die_while_saving(dies_at)
    if not ends:
        never_save(24)
    torch.manual_seed(7)
    settings = recipe(
        run={"steps": 24, "log_every": 7}, checkpoint={"every": 4}, ema={"decay": 0.9},
        evaluation={"every": 9}, data={"accumulate": 2},
    )  # fmt: skip
    Trainer(settings, TinyModel(), Slow(), folder).run()
