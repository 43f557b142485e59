"""Compilation needs a Python without Triton's interpreter, which the rest of the suite runs in: a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def uninterpreted() -> Callable[..., list[dict]]:
    """Runs Python with the given arguments and without the interpreter; what it prints is JSON."""

    def run(*arguments: str) -> list[dict]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment | dict(PYTHONPATH=os.pathsep.join(paths)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
