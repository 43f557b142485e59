"""A trace of some steps of a run, by PyTorch's profiler, as Perfetto and Chrome show it, and where the time went."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from tilestack.files import whole_file, write_text_whole

WARM_UP = 4  # steps left out: the first compile, allocate and tune, and the fourth may be captured as a graph
SAID = 5  # of what took longest; the file beside the trace has all


def quiet_profiler(**settings: Any) -> torch.profiler.profile:
    """PyTorch's profiler, which otherwise says on standard error when it starts and stops. It looks when the first one starts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above every level that it has
    return torch.profiler.profile(**settings)


class Share(NamedTuple):
    """What one kernel, or one operator of a CPU, took of a step."""

    name: str
    calls: float
    milliseconds: float


def shares_of(profiler: torch.profiler.profile, steps: int) -> list[Share]:
    """What took the time of a step, longest first: kernels where there is a GPU, operators without those in them elsewhere."""
    averages = profiler.key_averages()
    kernels = [each for each in averages if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    time = (lambda event: event.self_device_time_total) if kernels else (lambda event: event.self_cpu_time_total)
    found = [Share(event.key, event.count / steps, time(event) / steps / 1e3) for event in kernels or averages]
    return sorted((share for share in found if share.milliseconds > 0), key=lambda share: -share.milliseconds)


def as_text(shares: list[Share]) -> str:
    total = sum(share.milliseconds for share in shares)
    rows = [
        f"{share.milliseconds / total:6.1%} {share.milliseconds:10.3f} {share.calls:8.1f}  {share.name}"
        for share in shares
    ]
    return "\n".join([f"{'share':>6} {'ms a step':>10} {'calls':>8}  of {total:.3f} ms", *rows, ""])


class StepProfiler(AbstractContextManager):
    """Records `steps` steps, after the first four of this process, and writes `profile/steps-….json` in the run's folder,
    and beside it what took the time as a text."""

    def __init__(self, folder: Path, steps: int, say: Callable[[str], Any]):
        self.folder, self.steps, self.say = folder, steps, say
        self.step = self.counted = 0

    def __enter__(self) -> "StepProfiler":
        on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        schedule = torch.profiler.schedule(wait=0, warmup=WARM_UP, active=self.steps, repeat=1)
        self.profiler = quiet_profiler(
            activities=[torch.profiler.ProfilerActivity.CPU, *on_gpu],
            schedule=schedule,
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)
        if self.counted <= WARM_UP:
            self.say(f"no trace: there were no steps left after the first {WARM_UP}")

    def finish_step(self, step: int) -> None:
        self.step, self.counted = step, self.counted + 1
        self.profiler.step()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self.counted <= WARM_UP:
            return
        path = self.folder / "profile" / f"steps-to-{self.step:06d}.json"
        with whole_file(path) as hidden:
            profiler.export_chrome_trace(str(hidden))
        steps = self.counted - WARM_UP
        shares = shares_of(profiler, steps)
        write_text_whole(path.with_suffix(".txt"), as_text(shares))
        total = sum(share.milliseconds for share in shares)
        first = "; ".join(f"{share.milliseconds / total:.0%} {share.name[:60]}" for share in shares[:SAID])
        self.say(
            f"a trace of {steps} steps is in {path}; open it at https://ui.perfetto.dev. Most time went to: {first}"
        )
