"""What the machine can do at best, measured in the run that uses it: the roofs that operators are held against."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilestack.lab.bench.timing import Call, Candidate, measure, one_thread_on, processor_seconds
from tilestack.lab.labels import dtype_name

CPU_ATTEMPTS = 30


@dataclass(frozen=True)
class Roofs:
    copy_tb_per_s: float  # a large copy, bytes read plus bytes written
    matmul_tflops: dict[str, float]  # by dtype, a large square product through PyTorch
    host_floor_us: float  # host time of a trivial PyTorch call

    def floor_us(self, flops: float, moved: float, dtype: str, of_codes: bool = False) -> float:
        """The least time for an amount of arithmetic in a dtype and of bytes moved, whichever takes longer. Tensor cores
        multiply codes of 8 bits twice as fast as numbers of 16."""
        rate = self.matmul_tflops.get("bfloat16" if of_codes else dtype, self.matmul_tflops["float32"])
        return max(moved / self.copy_tb_per_s, flops / (2 * rate if of_codes else rate)) * 1e-6

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def least_us(call: Call) -> float:
    """The least time of a call on a CPU, where caches and clocks are shared with what else is running."""
    with one_thread_on("cpu"):
        call()
        return min(processor_seconds(call, 1) for _ in range(CPU_ATTEMPTS)) * 1e6


@functools.cache
def measure_roofs(device_type: str) -> Roofs:
    """The roofs of this process's GPU or CPU, measured the first time they are asked for."""
    on_cuda = device_type == "cuda"
    elements, side = (2**27, 8192) if on_cuda else (2**24, 1024)
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if on_cuda else (torch.float32,)

    def timed(prepare: Callable[[int], list[Call]], touched: float) -> tuple[float, float]:
        if not on_cuda:
            return (least_us(*prepare(1)),) * 2
        timing = measure({"roof": Candidate(prepare)}, touched, device_type)["roof"]
        if timing.time_us is None or timing.host_us is None:
            raise RuntimeError(f"could not measure what this {device_type} can do: {timing.note}")
        return timing.time_us, timing.host_us

    def copies(n: int) -> list[Call]:
        pairs = [[torch.randn(elements, device=device_type).to(torch.bfloat16) for _ in range(2)] for _ in range(n)]
        return [functools.partial(target.copy_, source) for source, target in pairs]

    def products(dtype: torch.dtype, n: int) -> list[Call]:
        pairs = [[torch.randn(side, side, device=device_type).to(dtype) for _ in range(2)] for _ in range(n)]
        return [functools.partial(torch.mm, a, b) for a, b in pairs]

    def trifles(n: int) -> list[Call]:
        return [functools.partial(torch.zeros(1, device=device_type).add_, 1) for _ in range(n)]

    moved = 2 * 2 * elements
    rates = {}
    for dtype in dtypes:
        took, _ = timed(functools.partial(products, dtype), 3 * side * side * dtype.itemsize)
        rates[dtype_name(dtype)] = 2 * side**3 / took * 1e-6
    copy_us, _ = timed(copies, moved)
    # Said to touch as much as the copy, so that it is prepared once: host time needs no cold cache.
    _, host_us = timed(trifles, moved)
    return Roofs(moved / copy_us * 1e-6, rates, host_us)
