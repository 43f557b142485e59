"""Triton's interpreter, mended where it would silently be wrong, or right where a GPU is not. On a GPU nothing is changed.

`tl.dot` of bfloat16: numpy has no such type, so the interpreter holds the bits as integers, and multiplies these. Of float16,
numpy adds products one by one, which loses more than tensor cores do: these sum up as many products as fill 32 bytes before
they round, and so it is done here, in float64. Products of wider floats are summed by `einsum` rather than by the BLAS behind
`matmul`, whose order depends on where a row is in the tile: on some processors (Zen 5), equal rows get other bits in another
place, which on a GPU they do not.

Float32 to bfloat16 was cut off, towards zero, so that kernels lost twice what they lose on a GPU, and all of it in one
direction. It is rounded to nearest, ties to even.

`tl.minimum` and `tl.maximum` of NaN and a number are NaN in the interpreter and the number on a GPU, unless a kernel asks
for NaN. A kernel that leans on the first passes every test without a GPU.

Float8_e4m3fn: numbers just below a power of two became half of it, and ties went away from zero. They are rounded to nearest,
ties to even, and beyond the largest code to that, as on a GPU.

`triton.autotune` has no GPU to time its configurations on: it takes the first that its pruning leaves.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from tilestack.contract.backends import interpreting

STEP_BYTES = 32  # of a row that tensor cores multiply in one step
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def widened(operand: Any) -> np.ndarray | None:
    """The numbers of an operand of 8 or 16 bits in float64, which holds a step's sum of their products exactly unless these
    are very far apart; None of other types."""
    kind = operand.dtype.scalar
    if kind == tl.float16:
        return operand.data.astype(np.float64)
    if kind == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind in FP8:
        return torch.from_numpy(np.array(operand.data)).view(FP8[kind]).double().numpy()
    return None


def sum_in_steps(a: np.ndarray, b: np.ndarray, total: np.ndarray, step: int) -> np.ndarray:
    """total + a b, where so many products at a time are added to the total, which is rounded after each step."""
    for k in range(0, a.shape[-1], step):
        total = total + (a[..., k : k + step] @ b[..., k : k + step, :]).astype(total.dtype)
    return total


def mend_products() -> None:
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        wide_a, wide_b = widened(a), widened(b)
        if wide_a is not None and wide_b is not None:
            result = sum_in_steps(wide_a, wide_b, total.data, STEP_BYTES * 8 // a.dtype.scalar.primitive_bitwidth)
        elif a.data.dtype.kind == "f":
            product = np.einsum("...ij,...jk->...ik", np.ascontiguousarray(a.data), np.ascontiguousarray(b.data))
            result = product.astype(total.data.dtype) + total.data
        else:
            return multiply(self, a, b, total, *rest)
        return interpreter.TensorHandle(result, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def mend_bfloat16() -> None:
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        if source.dtype.scalar != tl.float32 or wanted.scalar != tl.bfloat16:
            return cast(self, source, wanted)
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), wanted.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def mend_extremes() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def mend_fp8() -> None:
    convert = interpreter.InterpreterBuilder.create_fp_to_fp
    largest = torch.finfo(torch.float8_e4m3fn).max

    def create_fp_to_fp(self: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        if wanted.scalar != tl.float8e4nv or source.dtype.scalar not in (tl.float16, tl.float32):
            return convert(self, source, wanted, rounding)
        numbers = torch.from_numpy(np.array(source.data)).clamp(-largest, largest)
        return interpreter.TensorHandle(numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), wanted.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def mend_autotuning() -> None:
    Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]


if interpreting():
    mend_products()
    mend_autotuning()
    mend_bfloat16()
    mend_extremes()
    mend_fp8()
