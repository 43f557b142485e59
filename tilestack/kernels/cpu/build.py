"""Compiling C++ for this CPU on first use and calling what is in it; nothing happens on import.

    library("decode_step.cpp", WEIGHT="int8_t") ──▶ g++ ──▶ <cache>/tilestack/cpu/decode_step-<hash>.so ──▶ ctypes

It takes seconds, as no header of PyTorch is read. The hash is of the source, all headers, the flags and the CPU, so what
is there is never stale.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilestack.kernels.cuda.build import BuildError, cache_folder, only_process

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
SECONDS = 120  # that a compiler may take


def compiler() -> str:
    return os.environ.get("CXX", "g++").split()[0]


def missing_compiler() -> str:
    """What a compilation lacks here; empty when nothing."""
    return "" if shutil.which(compiler()) else f"there is no {compiler()} to compile it"


@functools.cache
def library(source: str, **macros: str) -> ctypes.CDLL:
    """The functions of a source in this folder, compiled for this CPU with macros."""
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
    read = [SOURCES / source, *sorted(SOURCES.glob("*.h"))]
    key = "\n".join([*flags, compiler(), cpu_kind()]).encode() + b"".join(each.read_bytes() for each in read)
    name = f"{Path(source).stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    built = cache_folder().with_name("cpu") / name
    if not built.exists():
        with only_process(built.with_suffix(".lock")):
            if not built.exists():
                compile_to(built, SOURCES / source, flags)
    return ctypes.CDLL(str(built))


def cpu_kind() -> str:
    """What code for this CPU depends on; a cache may be shared by several machines."""
    try:
        told = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        told = ""
    found = re.search(r"^(flags|Features)\s*:\s*(.+)$", told, re.MULTILINE)
    return f"{platform.machine()} {found[2] if found else platform.processor()}"


def compile_to(built: Path, source: Path, flags: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder, built.name)
        command = [compiler(), *flags, str(source), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.CalledProcessError as failed:
            raise BuildError(f"{source.name} did not compile:\n{failed.stderr}") from None
        except (OSError, subprocess.TimeoutExpired) as failed:
            raise BuildError(f"{source.name} did not compile: {failed}") from None
        made.replace(built)  # it takes its name when it is whole
