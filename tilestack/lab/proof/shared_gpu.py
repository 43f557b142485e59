"""One GPU for several processes at once, by NVIDIA's MPS; without it they would take turns, and each wait for the others' time slices."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def shared_gpu() -> Iterator[None]:
    """For processes that are started inside: MPS, where its control program is installed and nobody has set it up. Where it
    does not start, nothing is different."""
    if not shutil.which(CONTROL) or any(place in os.environ for place in PLACES):
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = os.environ | dict.fromkeys(PLACES, folder)
        nothing = subprocess.DEVNULL  # no pipe, which the daemon would hold open
        if subprocess.run([CONTROL, "-d"], env=places, stdin=nothing, stdout=nothing, stderr=nothing).returncode:
            yield
            return
        os.environ.update(dict.fromkeys(PLACES, folder))
        try:
            yield
        finally:
            subprocess.run([CONTROL], input=b"quit\n", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for place in PLACES:
                del os.environ[place]
