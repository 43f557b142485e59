"""Another Python process, to build beside this one and to be killed."""

import os
import signal
import subprocess
import sys


def started(code, *arguments, **environment):
    """One that Ctrl-C ends, also where the tests themselves run in the background and ignore it."""
    here = os.environ | {"PYTHONPATH": ":".join(sys.path)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=here, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
