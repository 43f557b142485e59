"""Triton's interpreter, mended where it would be silently wrong: `tl.dot` of bfloat16.

numpy has no bfloat16, so the interpreter holds its bits as integers; `tl.dot` multiplies these integers. Here operands are
widened to float32 first, which tensor cores do too. On a GPU nothing is changed.
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


if interpreting():
    mend_products()
