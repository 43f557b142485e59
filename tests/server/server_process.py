"""A server in a process of its own: `python server_process.py PACE DRAIN` serves the fake engine; or any command that logs
as `tilestack serve` does."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager


class Process:
    def __init__(self, *command, **environment):
        clean = {name: value for name, value in os.environ.items() if name != "TILESTACK_API_KEY"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self.url = self.wait_for("listening")["address"]

    def wait_for(self, event):
        """The line of the log that tells of an event."""
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("{") and (told := json.loads(line))["event"] == event:
                return told
        raise AssertionError("".join(self.lines))

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def end(self, seconds=120):
        """Its exit code, and the rest of its log."""
        _, rest = self.process.communicate(timeout=seconds)
        self.lines += rest.splitlines(keepends=True)
        return self.process.returncode


@contextmanager
def process(*command, **environment):
    made = Process(*command, **environment)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


if __name__ == "__main__":
    from fake_engine import FakeEngine
    from server_thread import small_tokenizer

    from tilestack.server.listening import listen
    from tilestack.server.process import run_server
    from tilestack.server.settings import ServerSettings

    settings = ServerSettings(port=0, drain=float(sys.argv[2]))
    run_server(FakeEngine(small_tokenizer(), pace=float(sys.argv[1])), settings, listen(settings))
