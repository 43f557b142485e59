"""Files and folders that are whole or not there, whatever kills the process that writes them; and nothing removed that
tilestack did not make.

What is written begins under a hidden name beside its place, is synced to the disk, and takes its place by a rename:

    .model.tilestack-part/   being written
    .model.tilestack-old/    what it replaces, until it is in place
    .model.tilestack-gone/   what is being removed
    .model.tilestack-writing locked by who writes it, as two at once would take each other's files
    model/                   whole
      .tilestack.json        the marker: which of the files in the folder tilestack made

A folder without the marker is someone else's and is refused. Of one that has it, only the files in the list are ever
removed: what somebody put there stays, in `model.kept` when the folder itself had to make way.
"""

import errno
import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MARKER = ".tilestack.json"
PART, OLD, GONE, WRITING = "tilestack-part", "tilestack-old", "tilestack-gone", "tilestack-writing"
ABANDONED = 3600.0  # seconds in which a process that lives has written to its file
STATUS = Path("/proc/self/status")


def expand_home(path: str | Path) -> Path:
    """A path, whose leading ~ is the home folder also where no shell has read it: in a recipe, and after --folder=."""
    return Path(path).expanduser() if Path(path).parts[:1] == ("~",) else Path(path)


class ForeignFolder(ValueError):
    """A folder that tilestack did not make and therefore leaves alone."""


class BusyFolder(ValueError):
    """A folder that another process is writing."""


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A hidden path to write, which takes the target's name and place at the end; after an error nothing is left of it. A link
    to a file stays, and a device or pipe is written as it is: one that gave up its place, as root may let /dev/null do, would
    be gone for all."""
    if target.exists() and not target.is_file() and not target.is_dir():
        with naming(target):
            yield target
        return
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    hidden = beside(target, f"{os.urandom(4).hex()}.{PART}")  # its own, since others may write the same file now
    try:
        with naming(target):
            yield hidden
            let_others_read(hidden)
            put_in_place(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)


def remove_abandoned(target: Path) -> None:
    """Remove what processes that were killed have written of a file."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.{PART}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Say in the error of a full disk, which tells nothing of where, what was being written."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT) and problem.filename is None:
            problem.filename = str(target)
        raise


def write_text_whole(target: Path, text: str) -> None:
    """Write a small file in one step."""
    with whole_file(target) as hidden:
        hidden.write_text(text, encoding="utf-8")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let processes that renew the same file of a folder wait for each other; one that dies is out."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextmanager
def whole_folder(target: Path, *, carry: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """A hidden folder to fill, which takes the target's name and place at the end; after an error nothing is left of it.

    The target may be missing, empty, or a folder made before. With `carry` it may be anyone's: what is in it and is to be
    carried over stays, as a copy in the new folder, and all else in it is replaced. A link to a folder stays: the folder that
    it leads to, perhaps on another disk, is the target.
    """
    target = target.resolve()
    hidden = beside(target, PART)
    with naming(target), only_writer(target):
        settle(target)
        if carry is None:
            refuse_foreign(target)
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            hidden.mkdir()
            yield hidden
            made = files_in(hidden)
            let_others_read(*made)
            write_marker(hidden, files=[str(path.relative_to(hidden)) for path in made])
            if carry is not None and target.is_dir():
                for path in target.iterdir():
                    if carry(path) and path.name != MARKER:
                        (shutil.copytree if path.is_dir() else shutil.copy2)(path, hidden / path.name)
            put_in_place(hidden, target, whole=carry is not None)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """Refuse a folder that another process is writing. Of one that was killed a file is left that is locked no more."""
    sign = beside(target, WRITING)
    sign.parent.mkdir(parents=True, exist_ok=True)
    opened = os.open(sign, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(opened), os.stat(sign))  # not removed by who had it, as it ended
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise BusyFolder(f"another process is writing {target}; wait for it, or choose another place")
        try:
            yield
        finally:
            os.unlink(sign)
    finally:
        os.close(opened)


def put_in_place(made: Path, target: Path, *, whole: bool = False) -> None:
    """Sync what was made, let it take the target's place, and only then remove what was there: our files, or the `whole`."""
    sync_all(made)
    old = beside(target, OLD)
    if target.is_dir():  # a folder cannot be renamed over another
        target.rename(old)
    made.replace(target)
    sync(target.parent)
    if whole:
        shutil.rmtree(old, ignore_errors=True)
    settle(target)


def settle(target: Path) -> None:
    """Bring back what a process that was killed between two renames left aside, and remove what it no longer needed."""
    old = beside(target, OLD)
    if old.exists() and not target.exists():
        old.rename(target)
    remove_made(old, name=target.name)
    remove_made(beside(target, GONE), name=target.name)


def discard(folder: Path) -> None:
    """Remove a folder that tilestack made. It is renamed first, so that a kill leaves nothing that looks whole."""
    if folder.exists():
        refuse_foreign(folder)
        settle(folder)
        folder.rename(beside(folder, GONE))
        settle(folder)


def remove_made(folder: Path, name: str) -> None:
    """Remove the files of a folder that its marker lists, and the folder with them; what else is there is kept by a name."""
    if not folder.exists():
        return
    inside = lambda name: not Path(name).is_absolute() and ".." not in Path(name).parts
    for listed in [*filter(inside, read_marker(folder).get("files", ())), MARKER]:
        (folder / listed).unlink(missing_ok=True)
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    if any(folder.iterdir()):
        folder.rename(unused(folder.with_name(f"{name}.kept")))
    else:
        folder.rmdir()


def clean_parts(folder: Path) -> None:
    """Clear up what a killed process left half-written, half-replaced or half-removed in a folder."""
    for path in (*folder.glob(f".*.{PART}"), *folder.glob(f".*.{WRITING}")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for what in (OLD, GONE):
        for path in folder.glob(f".*.{what}"):
            settle(path.with_name(path.name.removeprefix(".").removesuffix(f".{what}")))


def refuse_foreign(folder: Path) -> None:
    """Refuse a place that is taken by something without our marker; an empty folder is nobody's."""
    if not folder.exists() or (folder.is_dir() and (read_marker(folder) or not any(folder.iterdir()))):
        return
    raise ForeignFolder(
        f"{folder} was not made by tilestack ({contents(folder)}); move it away, or choose another place"
    )


def contents(folder: Path) -> str:
    """Some of what is in a folder, for an error."""
    if not folder.is_dir():
        return "it is a file"
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name.startswith("."), name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"it holds {', '.join(names[:3])}{more}"


def write_marker(folder: Path, **about: Any) -> None:
    with naming(folder):
        (folder / MARKER).write_text(json.dumps({"made_by": "tilestack", **about}, indent=1) + "\n", encoding="utf-8")


def read_marker(folder: Path) -> dict[str, Any]:
    """What the marker of a folder says; empty where there is none."""
    try:
        about = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and about.get("made_by") == "tilestack" else {}


def let_others_read(*files: Path) -> None:
    """Give files the mode that the umask gives to new ones: safetensors makes its files for their owner alone."""
    mode = 0o666 & ~own_umask()
    for path in files:
        path.chmod(mode)


def own_umask() -> int:
    try:
        return int(STATUS.read_text().partition("\nUmask:")[2].split(maxsplit=1)[0], 8)
    except (OSError, IndexError):  # macOS has no such file, and Linux before 4.7 no such line
        umask = os.umask(0o077)  # it tells by setting, which other threads would see
        os.umask(umask)
        return umask


def files_in(folder: Path) -> list[Path]:
    """All files below a folder but its own marker; those of folders in it, which were made likewise, count."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)


def beside(path: Path, what: str) -> Path:
    """The hidden name under which a path is written or removed."""
    path = path.absolute()
    return path.with_name(f".{path.name}.{what}")


def unused(path: Path) -> Path:
    """The path, or with a number after it where it is taken."""
    names = (path.with_name(f"{path.name}{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def sync_all(path: Path) -> None:
    """Wait until a file, or a folder and all in it, is on the disk."""
    for inner in path.rglob("*") if path.is_dir() else ():
        sync(inner)
    sync(path)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
