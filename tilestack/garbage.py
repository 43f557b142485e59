"""The garbage collector beside work that a GPU waits for.

PyTorch, Triton and a model are hundreds of thousands of objects, and to walk them takes as long as a hundred steps of
decoding, or many of a small model's training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

A_PROGRAM = (
    10_000  # objects: Python itself has frozen some hundreds at its start (3.12), a program with PyTorch has more
)


@contextmanager
def startup_frozen(device: torch.device, collect: bool = True) -> Iterator[None]:
    """Inside, the collector passes over all that is there already, where it is a GPU that would wait for it; what was garbage
    then is collected before, or left until after. Inside another of these, nothing is different."""
    if device.type != "cuda" or gc.get_freeze_count() > A_PROGRAM:
        yield
        return
    if collect:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
