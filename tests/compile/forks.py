"""Runs Python without Triton's interpreter for many tests: it imports all that they need once, and each run is a fork of it.

A line of JSON asks for a run, with its arguments and environment; a line of JSON answers with what it printed.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback

from tilestack.contract import registry
from tilestack.lab.compile import explain, sample  # noqa: F401  imported for those that ask

registry.load_kernels()


def run(arguments: list[str]) -> None:
    """As `python` does with these arguments: a program after -c, or a file."""
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), dict(__name__="__main__"))
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def fork(asked: dict) -> dict:
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complaints:
        if (child := os.fork()) == 0:
            failed = 1
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(complaints.fileno(), 2)
                os.environ.update(asked["environment"])
                run(asked["arguments"])
                failed = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failed)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        complaints.seek(0)
        return dict(status=status, printed=printed.read(), complaints=complaints.read())


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)
