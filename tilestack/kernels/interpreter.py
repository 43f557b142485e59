"""Triton's interpreter, mended where it would silently be wrong, or right where a GPU is not. On a GPU nothing is changed.

`tl.dot` of bfloat16: numpy has no such type, so the interpreter holds the bits as integers, and multiplies these. Operands
are widened to float32 here, as tensor cores do.

`tl.minimum` and `tl.maximum` of NaN and a number are NaN in the interpreter and the number on a GPU, unless a kernel asks
for NaN. A kernel that leans on the first passes every test without a GPU.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tilestack.contract.backends import interpreting


def widened(operand: Any) -> Any:
    """An operand whose numbers numpy can multiply."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def mend_products() -> None:
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def mend_extremes() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


if interpreting():
    mend_products()
    mend_extremes()
