"""A trace of some steps of a run, by PyTorch's profiler, as Perfetto and Chrome show it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from tilestack.files import whole_file

WARM_UP = 2  # steps left out: the first compile, allocate and tune


class StepProfiler(AbstractContextManager):
    """Records `steps` steps, after the first two of this process, and writes `profile/steps-…json` in the run's folder."""

    def __init__(self, folder: Path, steps: int, say: Callable[[str], Any]):
        self.folder, self.steps, self.say = folder, steps, say
        self.step = self.counted = 0

    def __enter__(self) -> "StepProfiler":
        on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        schedule = torch.profiler.schedule(wait=0, warmup=WARM_UP, active=self.steps, repeat=1)
        self.profiler = torch.profiler.profile(
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
        self.say(f"a trace of {self.counted - WARM_UP} steps is in {path}; open it at https://ui.perfetto.dev")
