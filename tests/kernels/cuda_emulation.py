"""CUDA C++ kernels on a CPU, for tests: the sources as they are, compiled by g++ against headers of our own.

Threads become fibers (cuda_on_cpu/cuda_runtime.h) and instructions in PTX functions (cuda_on_cpu/ptx.cuh). Two things are
no C++ and are rewritten: a launch between three angle brackets, and shared memory whose size the launch says.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from tilestack.kernels.cuda import build

STAND_INS = Path(__file__).with_name("cuda_on_cpu")
LAUNCH = re.compile(r"(?P<kernel>[\w<>]+)<<<(?P<where>.*?), stream>>>\(", re.DOTALL)


def compiled_for_cpu(source: str, folder: Path, **constants: int) -> ctypes.CDLL:
    """What `build.library` gives, for tensors in host memory."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(build.SOURCES / "common.cuh", folder)
    shutil.copy(STAND_INS / "ptx.cuh", folder)
    text = (build.SOURCES / source).read_text(encoding="utf-8")
    text = LAUNCH.sub(r"on_cpu::launch(\g<kernel>, \g<where>, ", text)
    text = re.sub(r"extern __shared__ .*memory\[\];", "unsigned char* memory = on_cpu::grid->shared[blockIdx.x];", text)
    (folder / source).with_suffix(".cpp").write_text(text, encoding="utf-8")
    target = folder / f"{Path(source).stem}.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-I", str(STAND_INS)]
    flags += [f"-D{name}={value}" for name, value in constants.items()]
    command = ["g++", *flags, str((folder / source).with_suffix(".cpp")), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


def call_on_cpu(function, device, *arguments) -> None:
    """As `build.call`, with no stream."""
    function.restype = ctypes.c_char_p
    error = function(*map(build.as_c, arguments), ctypes.c_void_p(None))
    assert not error, error
