"""Building `node.cpp` when asked to, and finding what was built.

    tilestack doctor --build ──▶ g++ ──▶ <cache>/tilestack/native/node-<hash>.so ──▶ imported by the first call

No call and no import ever compiles: where nothing was built, or it does not load, the same is done in Python
(`call.py`, `autograd.py`). The hash is of the source, the flags, PyTorch and Python, so what is there is never stale.
`TILESTACK_NATIVE=0` does without what is there.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from tilestack.files import alone_in, put_in_place

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("node.cpp")
MODULE = "tilestack_node"
VARIABLE = "TILESTACK_NATIVE"
FLAGS = ("-std=c++20", "-O2", "-fvisibility=hidden", "-shared", "-fPIC")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")  # which are loaded already where this is
SECONDS = 600  # that a compiler may take


class NodeBuildError(RuntimeError):
    """`node.cpp` cannot be built here, and the message says why; everything works without it."""


@functools.cache
def native_node() -> ModuleType | None:
    """The module of `node.cpp`, where it was built for this PyTorch and Python and is wanted."""
    if turned_off():
        return None
    try:
        path = place_of_build()
    except RuntimeError:  # without a home nothing was built
        return None
    try:
        return load(path) if path.exists() else None
    except (ImportError, OSError) as refused:
        log.warning("calls go through Python, as what was built in C++ cannot be loaded: %s", refused)
        return None


def turned_off() -> bool:
    return os.environ.get(VARIABLE, "") == "0"


def load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, str(path), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    torch.autograd.graph.Node.register(module.CppFunction)
    return module


@functools.cache
def place_of_build() -> Path:
    """Where it is, or would be, for this PyTorch and Python."""
    about = [*FLAGS, torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI"))]
    digest = hashlib.sha256("\n".join([*about, platform.machine()]).encode())
    for source in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "tilestack", "native", f"node-{digest.hexdigest()[:16]}.so")


def missing_for_build() -> str:
    """What a build lacks here; empty when nothing."""
    if not shutil.which(compiler()[0]):
        return f"there is no {compiler()[0]} to compile it"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python.h is missing"
    return "" if headers_of_torch()[0].exists() else "this PyTorch comes without headers"


def compiler() -> list[str]:
    """The command that compiles: $CXX, perhaps with flags or behind another program, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def headers_of_torch() -> list[Path]:
    include = Path(torch.__file__).with_name("include")
    return [include, include / "torch" / "csrc" / "api" / "include"]


def build_node() -> Path:
    """Compile it, which takes a minute, unless that was done; processes that ask at the same time wait for the first."""
    if lacking := missing_for_build():
        raise NodeBuildError(f"{SOURCE.name} cannot be compiled: {lacking}; calls go through Python")
    try:
        built = place_of_build()
        with alone_in(built.parent):
            if not loads(built):
                compile_to(built)
    except NodeBuildError:
        raise
    except (OSError, RuntimeError) as refused:  # of the file system, or without a home
        raise NodeBuildError(
            f"there is no place for what is compiled: {refused}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    native_node.cache_clear()
    return built


def loads(built: Path) -> bool:
    """Whether it is there and whole; a machine with other system libraries may have built it."""
    try:
        return built.exists() and bool(load(built))
    except ImportError:
        return False


def compile_to(built: Path) -> None:
    found = [f"-I{path}" for path in (*headers_of_torch(), sysconfig.get_paths()["include"])]
    found += [f"-L{Path(torch.__file__).with_name('lib')}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=built.parent) as aside:  # where nobody else's compiler writes
        made = Path(aside, built.name)
        command = [*compiler(), *FLAGS, abi, *found, str(SOURCE), *LIBRARIES, "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.CalledProcessError as failed:
            raise NodeBuildError(f"{SOURCE.name} did not compile:\n{failed.stderr}") from None
        except subprocess.TimeoutExpired as failed:
            raise NodeBuildError(f"{SOURCE.name} did not compile: {failed}") from None
        try:
            load(made)
        except ImportError as refused:
            raise NodeBuildError(f"{SOURCE.name} was compiled and cannot be loaded: {refused}") from None
        put_in_place(made, built)
