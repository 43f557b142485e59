"""Whether files still hold what they held: a digest of each, computed again only where the file system saw a change.

Size, times and inode are asked first. The time of the last change to an inode cannot be set by a program, so a file in
which all of these are as they were has not been written since, and gigabytes need not be read at every start.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 22

Fingerprint = dict[str, Any]  # path, seen (what the file system says), digest


def fingerprints(paths: Iterable[Path], known: Sequence[Mapping[str, Any]] = ()) -> list[Fingerprint]:
    """What the files hold; digests that are `known` and still good are taken over."""
    earlier = {one["path"]: one for one in known}
    found = []
    for path in paths:
        status = path.stat()
        seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        before = earlier.get(str(path), {})
        digest = before["digest"] if before.get("seen") == seen else digest_of(path)
        found.append({"path": str(path), "seen": seen, "digest": digest})
    return found


def digest_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def changed_files(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """The paths that are new, gone, or hold something else; also where only their order changed."""
    ours, theirs = ({one["path"]: one["digest"] for one in found} for found in (now, before))
    changed = [path for path in dict.fromkeys([*theirs, *ours]) if ours.get(path) != theirs.get(path)]
    return changed or ([] if list(ours) == list(theirs) else list(ours))
