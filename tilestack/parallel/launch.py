"""Starting the processes of a run on this machine, as `torchrun --standalone` does, by the same launcher.

The launcher passes Ctrl-C and SIGTERM on, and waits while the processes save; where one fails it ends the others. What they
have to say comes on their own standard error, so the launcher itself says only what none of them could: that one was killed.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from tilestack.parallel import environment
from tilestack.parallel.processes import ProcessLost

ENDING = 600  # seconds that processes have to save and end, once asked to, unless told


def launch(processes: int, arguments: Sequence[str], advice: str = "", ending: int = ENDING) -> int:
    """Run `tilestack` with some arguments in so many processes of one group; the exit code of all. `advice` ends the error of
    a process that was killed; `ending` are the seconds that they have to end, once asked to."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(ending))
    os.environ[environment.LAUNCHER] = str(os.getpid())
    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "tilestack", *arguments)
    except SignalException as asked:
        return 128 + asked.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise ProcessLost(
                f"the process of rank {rank} was ended by {name}"
                + (", as a machine does that runs out of memory" if name == "SIGKILL" else "")
                + (f"; {advice}" if advice else "")
            ) from None
        return failure.exitcode
    return 0
