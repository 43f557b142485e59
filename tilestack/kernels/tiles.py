"""What every launcher asks for: how many pieces cover a size, how a tensor lies as rows, what the GPU has."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.backends import interpreting

INTERPRETED = tl.constexpr(interpreting())  # there, a reduction of several tiles goes element by element


def cdiv(number: int, size: int) -> int:
    """How many pieces of a size cover a number. Triton's own costs 2 µs on the host."""
    return -(-number // size)


def next_power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; a plausible number where there is none, for the interpreter and compilation."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 132


def shared_memory(device: torch.device) -> int:
    """Bytes in which a program may keep what is loaded ahead."""
    if device.type == "cuda":
        return shared_memory_of_gpu(device)
    hopper = device.type == "cpu" or triton.runtime.driver.active.get_current_target().arch in (90, 100)
    return 232_448 if hopper else 101_376


@functools.cache
def shared_memory_of_gpu(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


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


def widened(dtype: torch.dtype) -> torch.dtype:
    """What kernels keep sums in between two launches, as a tensor's dtype: that of `accumulator`."""
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def tile_of_rows(columns: int, elements: int = 2048, most_warps: int = 32) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of whole rows: short rows share one until it holds enough to be worth a program."""
    width = next_power(max(columns, 1))
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


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sum_two(a, b, axis: tl.constexpr = 0, keep_dims: tl.constexpr = False):
    """The sums of two tiles; where one line fills the tile, warps exchange both at once, for the latency of one."""
    if INTERPRETED or a.numel != a.shape[axis]:
        return tl.sum(a, axis, keep_dims), tl.sum(b, axis, keep_dims)
    else:
        return tl.reduce((a, b), axis, add_two, keep_dims)


@triton.jit
def sum_three(a, b, c, axis: tl.constexpr = 0, keep_dims: tl.constexpr = False):
    if INTERPRETED or a.numel != a.shape[axis]:
        return tl.sum(a, axis, keep_dims), tl.sum(b, axis, keep_dims), tl.sum(c, axis, keep_dims)
    else:
        return tl.reduce((a, b, c), axis, add_three, keep_dims)
