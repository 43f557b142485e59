"""Folders that are whole or not there, whatever kills the process that writes them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A hidden folder to fill, which takes the target's name and place at the end; after an error nothing is left of it."""
    hidden = target.with_name(f".{target.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        yield hidden
        shutil.rmtree(target, ignore_errors=True)
        hidden.rename(target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
