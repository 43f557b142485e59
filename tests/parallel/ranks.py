"""Runs a function on several processes that form a gloo group, and brings back the tensors that each returns.

Processes are forks of two servers, the even ranks of one and the odd ranks of the other, in which strings have other hashes:
as in a run, whose processes are started one by one, sets have another order on each.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

SECONDS = 240  # a process is given up after, on a machine with much else to do

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
processes = multiprocessing.get_context("forkserver")
servers = forkserver.ForkServer(), forkserver.ForkServer()
for server in servers:
    server.set_forkserver_preload(  # what takes seconds to import, once for all processes
        ["torch.distributed.fsdp", "torch.distributed.pipelining", "tilestack.kernels", "tilestack.train.pretrain"]
    )


def run_ranks(
    job: Callable[..., dict[str, Tensor]], ranks: int, folder: Path, *arguments: Any
) -> list[dict[str, Tensor]]:
    """What job(group, *arguments) returns on each rank. If one fails, all end, and its traceback is the error."""
    started = [processes.Process(target=one_rank, args=(job, rank, ranks, folder, arguments)) for rank in range(ranks)]
    for seed, server in enumerate(servers, 1):
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(seed)):
            server.ensure_running()
    try:
        for rank, process in enumerate(started):
            connect = servers[rank % len(servers)].connect_to_new_process
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
        deadline = time.monotonic() + SECONDS
        for process in started:
            process.join(max(0, deadline - time.monotonic()))
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()
    wrong = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not wrong, "\n".join(wrong)
    codes = [process.exitcode for process in started]
    assert not any(codes), f"exit codes {codes} after at most {SECONDS} s"
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(ranks)]


def one_rank(job: Callable[..., dict[str, Tensor]], rank: int, ranks: int, folder: Path, arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS))
    try:
        found = job(dist.group.WORLD, *arguments)
        save_file(
            {name: x.detach().clone().contiguous() for name, x in found.items()}, folder / f"rank-{rank}.safetensors"
        )
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
