"""The end of a kernel that writes rows as codes and a scale; what they are is in `ops.quantised`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.ops import quantised

SMALLEST_ROW = tl.constexpr(quantised.SMALLEST_ROW)
HALVES_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)  # no codes of float64, which has no use for them

# Adding and subtracting 1.5 · 2^23 leaves no bits below the point: rounding to nearest, ties to even, as torch.round.
NO_FRACTION = tl.constexpr(12582912.0)


@triton.jit
def magnitudes(y):
    """What a row's largest is taken of: |y|, and infinity for a NaN, which a maximum would skip."""
    return tl.where(y == y, tl.abs(y), float("inf"))


@triton.jit
def scale_of(largest, LARGEST_CODE: tl.constexpr):
    scale = tl.maximum(largest, SMALLEST_ROW) / LARGEST_CODE
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def codes_of(y, scale, CODES: tl.constexpr):
    """The codes nearest to y / scale; 0 for a NaN where the codes are integers."""
    codes = y * (1.0 / scale)
    if tl.int8 == CODES:
        codes = (tl.where(codes == codes, codes, 0.0) + NO_FRACTION) - NO_FRACTION
    return codes.to(CODES)


def writes_fp8(x: Tensor) -> bool | str:
    """What an implementation with fp8 codes answers to `when`."""
    if x.device.type == "cpu":
        return "Triton's interpreter rounds to fp8 wrongly just below powers of two; this needs a GPU"
    return reads_fp8(x)


def reads_fp8(x: Tensor) -> bool | str:
    """Whether there are instructions that convert from and to fp8 where x lies."""
    if x.device.type == "cpu":
        return True
    target = triton.runtime.driver.active.get_current_target()
    return (
        target.backend != "cuda" or target.arch >= 89 or f"fp8 needs compute capability 8.9, this GPU has {target.arch}"
    )
