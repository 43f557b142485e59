"""What torchrun tells each process it starts, read without importing PyTorch."""

import os

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in NAMES) and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    return int(os.environ["RANK"]) if launched() else 0


def world() -> int:
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """The number of this process on its machine, and of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0
