"""Launching a kernel for the price of a dictionary look-up, and the few things every launcher asks for.

`kernel[grid](...)` re-derives the specialisation of every argument in Python, 15 to 25 µs a call. `launch` does it once
per signature, then calls the compiled kernel. A signature is all that Triton specialises on: each tensor's dtype and
whether it starts on 16 bytes, the value of each integer, and the constants.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCHES_KEPT = 1 << 15  # compiled launches remembered before starting over, so that ever-changing sizes stay bounded

_compiled: dict[tuple, tuple] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel over a grid: tensors and numbers by position, constants (and num_warps, num_stages) by name."""
    if 0 in grid:
        return
    first: Tensor = arguments[0]
    if not first.is_cuda:  # Triton's interpreter, or a compilation for a GPU that is not here
        kernel[grid](*arguments, **constants)
        return
    device = first.get_device()
    signature: list = [kernel, device, *constants.items()]
    for value in arguments:
        if isinstance(value, Tensor):
            signature += value.dtype, value.data_ptr() & 15
        else:
            signature.append(float if type(value) is float else value)
    key = tuple(signature)
    if (ready := _compiled.get(key)) is None or device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _compile(key, kernel, grid, arguments, constants)
        return
    run, function, metadata, tail = ready
    width, height, depth = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(
        width,
        height,
        depth,
        torch._C._cuda_getCurrentRawStream(device),
        function,
        metadata,
        None,
        None,
        None,
        *arguments,
        *tail,
    )


def _compile(key: tuple, kernel: Any, grid: tuple[int, ...], arguments: Sequence, constants: dict[str, Any]) -> None:
    """Launch the ordinary way, and remember what was compiled."""
    compiled = kernel[grid](*arguments, **constants)
    if len(_compiled) >= LAUNCHES_KEPT:
        _compiled.clear()
    tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, tail


def programs_that_fit(x: Tensor) -> int:
    """How many multiprocessors the tensor's GPU has; a few stand-ins where there is none."""
    return (
        torch.cuda.get_device_properties(x.device).multi_processor_count
        if x.is_cuda
        else 4
        if x.device.type == "cpu"
        else 132
    )


def as_matrix(x: Tensor) -> Tensor:
    """x with all but its last dimension merged into one."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix of rows, each contiguous; copied only if its strides demand it."""
    rows = as_matrix(x)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What kernels add up in for a tensor of this dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def tile_of_rows(columns: int, elements: int = 2048, per_warp: int = 512, most_warps: int = 16) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of whole rows: short rows share one until it holds enough elements to be worth a program."""
    width = triton.next_power_of_2(max(columns, 1))
    height = max(1, elements // width)
    return height, width, min(max(height * width // per_warp, 1), most_warps)


@triton.jit
def wide(x):
    """At least float32: half precisions are computed in float32, float64 stays float64 for gradcheck."""
    if x.dtype == tl.float64:
        y = x
    else:
        y = x.to(tl.float32)
    return y
