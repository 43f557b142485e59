"""The doctor: what is on this machine, what will run here, and how to fix the rest."""

import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from tilestack.contract.native.build import VARIABLE, missing_for_build, native_node, place_of_build, turned_off
from tilestack.extras import install_command
from tilestack.lab.machine import dotted, driver_version, text_of_file, version_of
from tilestack.shipped import checkout

TESTED = {"torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 7))}
EXTRAS = {  # one telling module of each extra, and what it is for
    "report": ("plotly", "the HTML report"),
    "hf": ("transformers", "patching and comparing with Hugging Face models"),
    "server": ("fastapi", "the HTTP server"),
    "formats": ("gguf", "models in GGUF files"),
    "chat": ("gguf", "chat with the model smollm2"),
    "data": ("datasets", "downloading data sets"),
    "evaluation": ("lm_eval", "tasks of lm-evaluation-harness in `tilestack eval`"),
    "tensorboard": ("tensorboard", "the metrics of training in TensorBoard"),
    "dev": ("pytest", "the tests"),
}


@dataclass(frozen=True)
class Finding:
    """One thing the doctor looked at. `limited` and `missing` come with a fix."""

    what: str
    status: str  # ok, limited or missing
    text: str
    fix: str = ""


def doctor() -> list[Finding]:
    """What is here, what will run and what will not, and what to do about it."""
    found = [python(), tested("torch"), tested("triton"), gpu(), interpreter(), compiler(), node(), disk(), memory()]
    return [*found, *extras()]


def release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: 2.13.0+cpu is (2, 13, 0)."""
    numbers = re.match(r"[\d.]*\d", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def python() -> Finding:
    here = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", "ok", here)
    return Finding("Python", "limited", f"{here}, tested are 3.11 to 3.13", "make PYTHON=python3.12 test")


def tested(package: str) -> Finding:
    """A package against the range of versions that the tests run on."""
    oldest, newest = TESTED[package]
    here = version_of(package)
    if not here:
        only = "; only the definitions run" if package == "triton" else ""
        return Finding(package, "missing", f"not installed{only}", f"pip install '{package}>={dotted(oldest)}'")
    if oldest <= release(here)[:2] <= newest:
        return Finding(package, "ok", here)
    span = f"{here}, tested are {dotted(oldest)} to {dotted(newest)}"
    return Finding(package, "limited", span, f"pip install '{package}~={dotted(newest)}.0'")


def gpu() -> Finding:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        text = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB, "
            f"driver {driver_version() or 'unknown'}; kernels run"
        )
        if properties.major < 8:
            return Finding("GPU", "limited", text, "kernels are tested from compute capability 8.0 (A100) on")
        return Finding("GPU", "ok", text)
    cpu_torch = torch.version.cuda is None
    if driver := driver_version():
        why = "this PyTorch is built without CUDA" if cpu_torch else "PyTorch cannot use it"
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        return Finding("GPU", "limited", f"driver {driver}, but {why}", fix)
    without = "none found: definitions run on the CPU, kernels in Triton's interpreter; nothing is measured on kernels"
    return Finding("GPU", "limited", without, "run on a machine with an NVIDIA GPU for kernels and figures")


def interpreter() -> Finding:
    """Whether Triton's interpreter works here: Triton 3.6 cannot run loops with run-time bounds on numpy from 2.4 on."""
    triton, numpy = version_of("triton"), version_of("numpy")
    name = "interpreter"
    if not triton:
        return Finding(name, "missing", "needs Triton", "pip install triton")
    if not numpy:
        return Finding(name, "missing", "needs numpy", "pip install numpy")
    if release(triton) < (3, 7) and release(numpy) >= (2, 4):
        broken = f"Triton {triton} with numpy {numpy} breaks kernels whose loop bounds are known at run time only"
        return Finding(name, "limited", broken, "pip install 'numpy<2.4'")
    return Finding(name, "ok", "TRITON_INTERPRET=1 runs kernels on the CPU")


def compiler() -> Finding:
    """Triton builds its launcher, and torch.compile its CPU code, with a C compiler and Python's headers."""
    name, wanted = "C compiler", os.environ.get("CC")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if not found:
        lacking = f"CC={wanted} is not there" if wanted else "none found"
        return Finding(name, "missing", f"{lacking}: no Triton launches on a GPU, no torch.compile", "apt install gcc")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        fix = f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return Finding(name, "limited", f"{found}, but Python.h is missing: no Triton launches on a GPU", fix)
    return Finding(name, "ok", found)


def node() -> Finding:
    """Whether calls go through C++ here, their signatures and their gradients."""
    name = "C++ node"
    if turned_off():
        return Finding(name, "limited", f"{VARIABLE}=0: calls go through Python", f"unset {VARIABLE}")
    if native_node() is not None:
        return Finding(name, "ok", f"built: calls go through {place_of_build().name}")
    slower = "not built: calls take a few µs more on the host"
    if lacking := missing_for_build():
        return Finding(name, "limited", f"{slower}; {lacking}", "apt install g++, then tilestack doctor --build")
    return Finding(name, "limited", slower, "tilestack doctor --build")


def disk() -> Finding:
    free = shutil.disk_usage(Path.home() if Path.home().exists() else Path("/")).free / 2**30
    if free < 2:
        return Finding("disk", "limited", f"{free:.1f} GiB free", "compiled kernels and checkpoints want a few GiB")
    return Finding("disk", "ok", f"{free:.0f} GiB free")


def memory() -> Finding:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text_of_file("/proc/meminfo"), re.MULTILINE)
    if not found:
        return Finding("memory", "ok", "amount unknown")
    free = int(found[1]) / 2**20
    if free < 4:
        return Finding("memory", "limited", f"{free:.1f} GiB available", "the tests and the demo want 4 GiB")
    return Finding("memory", "ok", f"{free:.0f} GiB available")


def extras() -> Iterator[Finding]:
    for extra, (module, purpose) in EXTRAS.items():
        if extra == "dev" and checkout() is None:
            continue  # the tests do not come with a wheel
        if importlib.util.find_spec(module):
            yield Finding(f"extra {extra}", "ok", f"{module} {version_of(module)}, for {purpose}")
        else:
            yield Finding(f"extra {extra}", "missing", f"no {module}, for {purpose}", install_command(extra))


MARKS = {"ok": "[green]✓[/]", "limited": "[yellow]![/]", "missing": "[red]✗[/]"}


def render_findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="doctor", title_justify="left")
    for heading in ("", "what", "found", "to fix it"):
        table.add_column(heading, overflow="fold")  # a command cut short is no use
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.what, escape(finding.text), escape(finding.fix))
    return table
