"""Joining the processes that torchrun started, and leaving them: together at the end, and soon where one of them fails.

A process that fails leaves at once with its error. The others find their connections to it closed (gloo), or are ended by
torchrun where they would wait (NCCL). What several have to say is said by one, and that another was lost only where that one
could say nothing itself.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from tilestack.parallel import environment
from tilestack.parallel.mesh import Layout, Mesh

PATIENCE = timedelta(minutes=15)  # with a collective that does not end though nobody has left


class ProcessLost(RuntimeError):
    """Another process of the run ended before its time."""


@contextmanager
def joined(
    device: str, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1, advice: str = ""
) -> Iterator[Mesh]:
    """Inside, this process is at its place among those of the run, or alone where nobody else was started. `device` is auto,
    cpu or cuda; `advice` ends the error of one that lost another. Who has made a process group already keeps it."""
    there = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if there else environment.world()
    layout = Layout.fit(world, tensor=tensor, context=context, pipeline=pipeline, expert=expert)
    if world == 1:
        yield Mesh(layout)
        return
    kind = "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"
    if there:
        yield Mesh(layout, torch.device(kind))
        return
    end_with_launcher()
    if kind == "cuda":
        take_gpu()
    store, rank, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE
    )
    try:
        mesh = Mesh(layout, torch.device(kind))
        yield mesh
        mesh.wait_for_all()
    except Exception as problem:
        told = as_lost(problem, advice)
        if said_already(store, told):
            raise SystemExit(1) from problem
        if told is problem:
            raise
        raise told from problem
    dist.destroy_process_group()


def end_with_launcher() -> None:
    """Ask this process to stop, as by SIGTERM, when its launcher is gone, by whose hand ever, so that none is left behind on a
    GPU; one that does not is ended. (Linux could send the signal itself, but sends it for every thread of the launcher, and a
    second one means at once.)"""
    launcher = os.getppid()
    if environment.orphaned():
        raise ProcessLost("the process that started this one has ended")

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE.total_seconds())
        os._exit(1)  # it hangs, perhaps in saying why it fails, when it heeds no signal any more

    threading.Thread(target=watch, daemon=True).start()


def take_gpu() -> None:
    """Let `cuda` mean this process's own GPU."""
    number, found = environment.local_rank(), torch.cuda.device_count()
    if number >= found:
        raise ValueError(
            f"rank {environment.rank()} is process {number} of its machine, which has {found} GPUs; start at most as many "
            "processes there as it has, or set run.device=cpu"
        )
    torch.cuda.set_device(number)


def as_lost(problem: Exception, advice: str) -> Exception:
    """The error, or where it is that of a connection to another process, one that says so."""
    words = str(problem)
    if isinstance(problem, dist.DistError) or "gloo/transport" in words:  # gloo's are plain RuntimeErrors
        what = words.partition("] ")[2].partition("\n")[0].partition(". ")[0] or type(problem).__name__
        return ProcessLost(
            f"another process of the run ended, or did not answer ({what}), and has said nothing of its own"
            + (f"; {advice}" if advice else "")
        )
    return problem


def said_already(store: dist.Store, problem: Exception) -> bool:
    """Whether another process has said as much: the same error, or for one that lost another, any error of its own."""
    words = hashlib.blake2b(str(problem).encode(), digest_size=16).hexdigest()
    try:
        if isinstance(problem, ProcessLost):
            return store.add("tilestack/errors", 0) > 0 or store.add("tilestack/lost", 1) > 1
        store.add("tilestack/errors", 1)
        return store.add(f"tilestack/error/{words}", 1) > 1
    except RuntimeError:  # the store is gone with its process
        return False
