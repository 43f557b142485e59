"""Compilation needs a Python without Triton's interpreter, which the rest of the suite runs in: processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def uninterpreted() -> Iterator[Callable[..., Any]]:
    """Runs Python with the given arguments and without the interpreter; what it prints is JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, "tests/compile/forks.py"],
        cwd=ROOT,
        env=environment | dict(PYTHONPATH=os.pathsep.join(paths)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(*arguments: str) -> Any:
        given = {name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ}  # tests may set it
        server.stdin.write(json.dumps(dict(arguments=arguments, environment=given)) + "\n")
        server.stdin.flush()
        done = json.loads(server.stdout.readline())
        assert done["status"] == 0, done["complaints"]
        return json.loads(done["printed"])

    yield run
    server.communicate()
