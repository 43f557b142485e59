"""Launching a kernel for the price of a dictionary look-up, and the few things every launcher asks for.

`kernel[grid](...)` re-derives the specialisation of every argument in Python, 15 to 25 µs a call. `launch` does it once
per signature, then calls the compiled kernel. A signature is all that Triton specialises on: each tensor's dtype and
whether it starts on 16 bytes, the value of each integer, and the constants.
"""

import functools
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
    signature: list = [id(kernel), device, *constants.items()]
    values: list = []  # addresses in place of tensors, which spares the driver looking them up
    for value in arguments:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            signature += value.dtype, address & 15
            values.append(address)
        else:
            signature.append(float if type(value) is float else value)
            values.append(value)
    key = tuple(signature)
    ready = _compiled.get(key)
    if ready is None or device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _compile(key, kernel, grid, arguments, constants)
        return
    run, function, metadata, tail, _ = ready
    width, height, depth = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(width, height, depth, stream, function, metadata, None, None, None, *values, *tail)


def _compile(key: tuple, kernel: Any, grid: tuple[int, ...], arguments: Sequence, constants: dict[str, Any]) -> None:
    """Launch the ordinary way, and remember what was compiled."""
    compiled = kernel[grid](*arguments, **constants)
    if len(_compiled) >= LAUNCHES_KEPT:
        _compiled.clear()
    tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    # With the kernel itself, since its id is in the key and must not be given to another.
    _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, tail, kernel


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; a plausible number where there is none, for the interpreter and compilation."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 132


def as_matrix(x: Tensor) -> Tensor:
    """x with all but its last dimension merged into one."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix of rows, each contiguous; copied only if its strides demand it."""
    rows = x if x.ndim == 2 else as_matrix(x)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What kernels add up in for a tensor of this dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def tile_of_rows(columns: int, elements: int = 2048, most_warps: int = 32) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of whole rows: short rows share one until it holds enough to be worth a program."""
    width = triton.next_power_of_2(max(columns, 1))
    height = max(1, elements // width)
    size = height * width
    warps = size // 512 if size <= 4096 else max(8, size // 1024)
    return height, width, min(max(warps, 1), most_warps)


@triton.jit
def wide(x):
    """At least float32: half precisions are computed in float32, float64 stays float64 for gradcheck."""
    if x.dtype == tl.float64:
        y = x
    else:
        y = x.to(tl.float32)
    return y
