"""The stamp that every result carries: the machine it was measured on, and the versions and the commit it was measured with."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tilestack.lab.bench.peers import search_peers
from tilestack.tuning.preferences import gpu_slug

COMMIT_VARIABLE = "TILESTACK_COMMIT"  # says which commit this is where there is no git to ask


def stamp(device: str | None = None) -> dict[str, Any]:
    """What a measurement was made on and with; `gpu` is empty where the CPU was measured."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    properties = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "gpu": properties.name if properties else "",
        "slug": gpu_slug(properties.name) if properties else "cpu",
        "driver": driver_version() if properties else "",
        "capability": f"{properties.major}.{properties.minor}" if properties else "",
        "multiprocessors": properties.multi_processor_count if properties else 0,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cudnn": cudnn_version() if properties else "",
        "liger": version_of("liger_kernel"),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def cudnn_version() -> str:
    """cuDNN as its makers write it: 91002 is 9.10.2."""
    number = torch.backends.cudnn.version()
    return dotted((number // 10000, number // 100 % 100, number % 100)) if number else ""


def version_of(package: str) -> str:
    """The installed version of a package, or of one beside the checkout in peers/; empty when it is not there."""
    search_peers()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def output_of(*command: str, folder: Path | None = None) -> str:
    """What a command prints, empty when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@functools.cache
def driver_version() -> str:
    if told := output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        return told.splitlines()[0].strip()
    found = re.search(r"Kernel Module\D*([\d.]+)", text_of_file("/proc/driver/nvidia/version"))
    return found[1] if found else ""


@functools.cache
def commit() -> str:
    """The commit of this checkout, with -dirty when tracked files differ from it."""
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    dirty = output_of("git", "status", "--porcelain", "--untracked-files=no", folder=root)
    found = output_of("git", "rev-parse", "--short=12", "HEAD", folder=root)
    return f"{found}{'-dirty' if dirty else ''}" if found else "unknown"


def cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", text_of_file("/proc/cpuinfo"), re.MULTILINE)
    return f"{named[1] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def text_of_file(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
