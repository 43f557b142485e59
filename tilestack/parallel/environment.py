"""What torchrun tells each process it starts, and what our own launcher adds, read without importing PyTorch."""

import os

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER = "TILESTACK_LAUNCHER"  # its process id, of our own launcher alone


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


def orphaned() -> bool:
    """Whether the launcher of this process was gone before it could ask to end with it."""
    return os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid())
