"""Ctrl-C and SIGTERM: the first asks a run to save and stop, the second ends the program wherever it is.

Python runs a handler only between two of its own instructions, which a process deep in a large allocation or a long
kernel does not reach. The signal's number is also written to a pipe, in C and at once; a thread that reads the pipe ends
the process at the second. A run is exact after any kill, so nothing is lost but the steps since the last checkpoint.

What happens is said in a thread too. A handler stands wherever the program was, which may be in the middle of a print, or of
an import that printing needs; and what is said may have to wait for a terminal, as the second signal shall not.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM)
STOPPING = "stopping: the run is saved after this step; once more ends it at once"
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Interruption:
    """Inside, `number` is the signal that asked to stop, and 0 until then. `say` tells whoever asked what happens. A process
    `among` others, whose launcher ends all when one fails, is not ended once it fails itself: it has to say why."""

    def __init__(self, say: Callable[[str], Any] = lambda words: None, among: bool = False):
        self.number, self.say, self.among = 0, say, among
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        self.number = 0
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        self._pipe, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._before = {number: signal.signal(number, self._ask) for number in ASKING}
        self._wakeup = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup)
        if self.among and error[0] is not None:
            self._before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._written)  # ends the watching
        self._watching.join()
        os.close(self._pipe)

    def _ask(self, number: int, frame: Any) -> None:
        self.number = self.number or number

    def _watch(self) -> None:
        asked = 0
        while written := os.read(self._pipe, 1):
            if written[0] not in ASKING:
                continue
            asked += 1
            if asked == 1:
                threading.Thread(target=self.say, args=(STOPPING,), daemon=True).start()
            else:
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR + b"\n")
                os._exit(128 + written[0])
