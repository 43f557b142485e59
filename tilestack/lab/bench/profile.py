"""Where the time of a call goes: its kernels by PyTorch's profiler, and whose kernels they are.

On a GPU the lines are kernels and copies. Where kernels begin before the one in front has ended, as those of decoding do on
Hopper, a line has the time that a kernel waited too, and the lines come to more than the time in which any ran, which is
beside them. On a CPU the lines are PyTorch's operators, each without those that it calls, and ours by the names that its autograd has for them.
"""

import functools
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch.autograd import DeviceType

from tilestack.contract.registry import load_kernels, operators
from tilestack.files import whole_file
from tilestack.lab.units import microseconds, percent
from tilestack.train.run.profile import Share, quiet_profiler, shares_of

OURS = "tilestack"
# Whose a kernel is, by the first pattern that its name holds; what none of them knows is "other".
ORIGINS = {
    "NCCL": r"nccl",
    "copies": r"^Mem(cpy|set)",
    "torch.compile": r"^triton_(poi|red|per|tem|for|mm)_|Compiled(FxGraph|Function)|^Torch(Dynamo|-Compiled)|^AOTDispatcher|^Pregraph",
    "cuDNN": r"cudnn",
    "flash-attn": r"flash_(fwd|bwd)|pytorch_flash",
    "cuBLAS": r"nvjet|cublas|gemm|cutlass|splitK",
    "oneDNN": r"^mkldnn::",
    "PyTorch": r"at::native|at_cuda|^aten::|^torch::|vectorized_elementwise|^autograd::|Backward\d+$|^Optimizer\.|^detach$",
}
FUNCTIONS = ("JITFunction", "GluonJITFunction", "InterpretedFunction")


@dataclass(frozen=True)
class Profile:
    """What a call ran, over several calls."""

    shares: Sequence[Share]  # of one call, longest first
    wall_ms: float  # of one call, by the host's clock
    on_gpu: bool
    busy_ms: float = 0.0  # of one call: while any kernel ran

    @property
    def total_ms(self) -> float:
        return sum(share.milliseconds for share in self.shares)

    def by_origin(self) -> dict[str, float]:
        """Whose kernels took how much of the time, the most first."""
        found: dict[str, float] = {}
        for share in self.shares:
            origin = origin_of(share.name)
            found[origin] = found.get(origin, 0.0) + share.milliseconds / self.total_ms
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def divided(self, steps: int) -> "Profile":
        """Of one of the steps that a call took."""
        shares = [Share(name, calls / steps, milliseconds / steps) for name, calls, milliseconds in self.shares]
        return Profile(shares, self.wall_ms / steps, self.on_gpu, self.busy_ms / steps)

    def as_dict(self) -> dict[str, Any]:
        lines = [share._asdict() | {"origin": origin_of(share.name)} for share in self.shares]
        times = {"wall_ms": self.wall_ms, "total_ms": self.total_ms, "busy_ms": self.busy_ms}
        return times | {"on_gpu": self.on_gpu, "lines": lines}


@functools.cache
def our_kernels() -> frozenset[str]:
    """The names of our kernels: functions of Triton and Gluon, and of CUDA C++."""
    from tilestack import kernels

    load_kernels()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(kernels.__name__)]
    compiled = [name for module in modules for name, found in vars(module).items() if type(found).__name__ in FUNCTIONS]
    sources = [path for path in Path(kernels.__file__).parent.rglob("*") if path.suffix in (".cu", ".cuh")]
    declared = r"__global__\s+(?:void\s+)?(?:__launch_bounds__\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\("
    return frozenset(compiled + [name for path in sources for name in re.findall(declared, path.read_text())])


@functools.cache
def our_functions() -> frozenset[str]:
    """Implementations of operators, as PyTorch's autograd knows them."""
    return frozenset(f"{op.name}_{backend}" for op in operators() for backend in op.implementations)


def origin_of(name: str) -> str:
    """Whose kernel or operator this is."""
    function = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""))[0].rpartition(" ")[2]
    known = function in our_kernels() or function.removesuffix("Backward") in our_functions()
    if known or function.startswith("tilestack::"):
        return OURS
    return next((origin for origin, pattern in ORIGINS.items() if re.search(pattern, name)), "other")


def record(call: Callable[[], Any], device: torch.device, times: int = 1, trace: Path | None = None) -> Profile:
    """Profile a call, which has been warmed up, so many times; with `trace`, for Perfetto too."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    wait = (lambda: torch.cuda.synchronize(device)) if on_gpu else lambda: None
    with quiet_profiler(activities=activities, record_shapes=trace is not None) as profiler:
        wait()
        began = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        took = time.perf_counter() - began
    if trace is not None:
        with whole_file(trace) as hidden:
            profiler.export_chrome_trace(str(hidden))
    return Profile(shares_of(profiler, times), took / times * 1e3, on_gpu, busy_us(profiler) / times / 1e3)


def busy_us(profiler: torch.profiler.profile) -> float:
    """The time in which any kernel ran, those counted once that ran beside each other."""
    kernels = [
        each for each in profiler.events() if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]
    return length_of_union((each.time_range.start, each.time_range.end) for each in kernels)


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line is covered by pieces of it, which may overlap."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered


def render_profile(title: str, profile: Profile, most: int) -> Table:
    """The lines that took longest, and in words whose they are and how busy the GPU was."""
    whose = ", ".join(f"{origin} {percent(share)}" for origin, share in profile.by_origin().items())
    caption = f"{whose or 'nothing ran'}; {microseconds(profile.total_ms * 1e3)} in {len(profile.shares)} different"
    caption += " kernels" if profile.on_gpu else " operators"
    wall = microseconds(profile.wall_ms * 1e3)
    if profile.on_gpu:
        caption += f"; the GPU was busy {percent(profile.busy_ms / profile.wall_ms)} of {wall}"
    else:
        unseen = max(0.0, 1 - profile.total_ms / profile.wall_ms)
        caption += (
            f"; {wall} by the clock, {percent(unseen)} in code that PyTorch does not see (Python, tilestack's C++)"
        )
    caption += ", with the profiler on"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("share", "time", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("whose", no_wrap=True)
    table.add_column("kernel" if profile.on_gpu else "operator", overflow="fold")
    for share in profile.shares[:most]:
        part, took = percent(share.milliseconds / profile.total_ms), microseconds(share.milliseconds * 1e3)
        table.add_row(part, took, f"{share.calls:g}", origin_of(share.name), escape(share.name))
    return table
