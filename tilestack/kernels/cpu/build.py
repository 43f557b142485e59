"""Compiling C++ for this CPU on first use and calling what is in it; nothing happens on import.

    library("decode_step.cpp", WEIGHT="int8_t") ──▶ g++ ──▶ <cache>/tilestack/cpu/decode_step-<hash>.so ──▶ ctypes

It takes seconds, as no header of PyTorch is read. The hash is of the source, all headers, the flags and the CPU, so what
is there is never stale. Whatever goes wrong is a BuildError that says what to do.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilestack.kernels.cuda.build import BuildError, cache_folder, only_process

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
SECONDS = 120  # that a compiler may take


def compiler() -> list[str]:
    """The command that compiles: $CXX, perhaps with flags or behind another program, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def missing_compiler() -> str:
    """What a compilation lacks here; empty when nothing."""
    return "" if shutil.which(compiler()[0]) else f"there is no {compiler()[0]} to compile it"


@functools.cache
def library(source: str, **macros: str) -> ctypes.CDLL:
    """The functions of a source in this folder, compiled for this CPU with macros."""
    command = [*compiler(), *FLAGS, *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
    read = [SOURCES / source, *sorted(SOURCES.glob("*.h"))]
    key = "\n".join([*command, cpu_kind()]).encode() + b"".join(each.read_bytes() for each in read)
    built = library_folder() / f"{Path(source).stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        if found := loaded(built):
            return found
        with only_process(built.with_suffix(".lock")):
            if not loaded(built):
                compile_to(built, [*command, str(SOURCES / source)])
        return ctypes.CDLL(str(built))
    except OSError as refused:
        raise BuildError(
            f"{built} cannot be made and loaded: {refused}; set XDG_CACHE_HOME to a folder that allows both"
        ) from None


def library_folder() -> Path:
    try:
        return cache_folder().with_name("cpu")
    except RuntimeError as homeless:
        raise BuildError(
            f"there is no place for what is compiled: {homeless} Please set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def loaded(built: Path) -> ctypes.CDLL | None:
    """A library, if it is there; a crash may have cut it short, or a machine with other system libraries built it."""
    try:
        return ctypes.CDLL(str(built))
    except OSError:
        return None


def cpu_kind() -> str:
    """What code for this CPU depends on; a cache may be shared by several machines."""
    try:
        told = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        told = ""
    found = re.search(r"^(flags|Features)\s*:\s*(.+)$", told, re.MULTILINE)
    return f"{platform.machine()} {found[2] if found else platform.processor()}"


def compile_to(built: Path, command: list[str]) -> None:
    leftovers = built.with_suffix(".building")  # of a process that was killed, whose compiler may still write there
    shutil.rmtree(leftovers, ignore_errors=True)
    leftovers.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=leftovers), built.name)
    source = Path(command[-1]).name
    try:
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)  # fmt: skip
        with made.open("rb") as whole:
            os.fsync(whole.fileno())
        made.replace(built)  # it takes its name when all of it is on the disk
    except subprocess.CalledProcessError as failed:
        raise BuildError(f"{source} did not compile:\n{failed.stderr}") from None
    except subprocess.TimeoutExpired as failed:
        raise BuildError(f"{source} did not compile: {failed}") from None
    finally:
        shutil.rmtree(leftovers, ignore_errors=True)
