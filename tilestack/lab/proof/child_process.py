"""Starting a process that Ctrl-C in the terminal does not reach; nothing here imports PyTorch."""

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_without_ctrl_c(process: BaseProcess) -> None:
    """Start a process to which Ctrl-C is nothing: it is for this one, which ends the other."""
    resource_tracker.ensure_running()  # else the start would, and unblock the signal for that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
