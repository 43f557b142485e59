"""Compiling a `.cu` file on first use and calling what is in it; nothing happens on import.

    library("softmax.cu") ──▶ nvcc, g++ and ninja, through PyTorch ──▶ <cache>/tilestack/cuda/softmax-<hash>.so ──▶ ctypes

The hash is of the source, the headers beside it, its constants, PyTorch's version and the GPU, so what is there is never
stale, and it takes its name only when it is whole. While one process builds, others wait at a lock that the system takes
back when a process dies, by ctrl-C or worse. (PyTorch's own lock is a file that such a process leaves behind and that the
next waits for without end; so PyTorch builds in a folder that is new each time.)
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
CUDA_FLAGS = ("-O3", "-lineinfo")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}  # as `common.cuh` numbers them


class BuildError(RuntimeError):
    """A source did not compile, for which the message is the compiler's, or there is no place for what it compiles to."""

    def in_short(self) -> str:
        """Without what a compiler says after its first error, which may be a hundred lines."""
        first, *compilers = str(self).splitlines()
        return " ".join([first, *[line for line in compilers if "error" in line][:1]])


def cuda_needs(device: torch.device) -> bool | str:
    """True where CUDA C++ kernels can be compiled and run, else the reason."""
    if device.type != "cuda":
        return f"CUDA C++ kernels need a CUDA tensor, not one on {device.type}"
    return missing_tool() or True


@functools.cache
def missing_tool() -> str:
    """What a compilation lacks here, and where to get it; empty when nothing."""
    if not shutil.which(compiler := os.environ.get("CXX", "g++").split()[0]):
        return f"CUDA C++ kernels are compiled on first use and there is no {compiler}; install a C++ compiler"
    if not shutil.which("ninja"):
        return "CUDA C++ kernels are compiled on first use and there is no ninja; pip install ninja"
    try:
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError as missing:  # it needs setuptools
        return f"CUDA C++ kernels are compiled on first use through torch.utils.cpp_extension: {missing}"
    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        return "CUDA C++ kernels are compiled on first use and there is no nvcc; install the CUDA toolkit, or set CUDA_HOME"
    return ""


@functools.cache
def library(source: str, **constants: int) -> ctypes.CDLL:
    """The functions of a source in this folder, compiled for this GPU with constants as macros."""
    return load_library(SOURCES / source, constants, ".".join(map(str, torch.cuda.get_device_capability())))


def load_library(source: Path, constants: dict[str, int], architecture: str) -> ctypes.CDLL:
    """What was built of a source before, or is built now."""
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    name = f"{source.stem}-{build_key(source, [*macros, *CUDA_FLAGS, architecture, torch.__version__])}"
    built = cache_folder() / f"{name}.so"

    def load() -> ctypes.CDLL:
        if not built.exists():
            with only_process(built.with_suffix(".lock")):
                if not built.exists():
                    # A warning, so that whoever waits for it sees why, also where nobody listens to the log.
                    log.warning(
                        "compiling %s, once for this GPU and PyTorch; it is kept in %s", source.name, built.parent
                    )
                    compile_to(built, source, macros, architecture)
        return ctypes.CDLL(str(built))

    try:
        return load()
    except OSError:  # of a machine that went down when the name was on the disk and the contents were not
        built.unlink(missing_ok=True)
        return load()


def build_key(source: Path, flags: list[str]) -> str:
    digest = hashlib.sha256("\n".join(flags).encode())
    for path in (source, *sorted(source.parent.glob("*.cuh"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "tilestack", "cuda")


@contextmanager
def only_process(lock: Path) -> Iterator[None]:
    """Wait until no other process is in here; one that dies is out."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        opened = lock.open("w")
    except OSError as refused:
        raise BuildError(
            f"what is compiled goes to {lock.parent}, and that cannot be written: {refused}; "
            "set XDG_CACHE_HOME to a folder that can"
        ) from None
    with opened as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def compile_to(built: Path, source: Path, macros: list[str], architecture: str) -> None:
    from torch.utils import cpp_extension

    leftovers = built.with_suffix(".building")  # of a process that was killed
    shutil.rmtree(leftovers, ignore_errors=True)
    leftovers.mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(dir=leftovers)  # new each time: PyTorch remembers where it has been
    try:
        with architecture_asked(architecture):
            cpp_extension.load(
                name=source.stem, sources=[str(source)], extra_cflags=["-O3", *macros], is_python_module=False,
                extra_cuda_cflags=[*CUDA_FLAGS, *macros], build_directory=folder,
            )  # fmt: skip
        (made,) = Path(folder).glob("*.so")
        made.replace(built)
    except RuntimeError as failed:
        raise BuildError(f"{source.name} did not compile:\n{failed}") from None
    finally:
        shutil.rmtree(leftovers, ignore_errors=True)


@contextmanager
def architecture_asked(architecture: str) -> Iterator[None]:
    """The GPU to compile for, told the only way that PyTorch hears."""
    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    os.environ["TORCH_CUDA_ARCH_LIST"] = architecture
    try:
        yield
    finally:
        os.environ.pop("TORCH_CUDA_ARCH_LIST")
        os.environ.update({} if before is None else {"TORCH_CUDA_ARCH_LIST": before})


def call(function: Any, device: torch.device, *arguments: Any) -> None:
    """Launch on PyTorch's stream of a device. Tensors go as addresses, floats as double, all else as int64."""
    function.restype = ctypes.c_char_p
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        error = function(*map(as_c, arguments), ctypes.c_void_p(stream))
    if error:
        raise RuntimeError(f"{function.__name__}: {error.decode()}")


def as_c(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
