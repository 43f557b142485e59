"""Exponential and reciprocal for half precisions, by the same hardware instructions as `tl.exp` and a division.

What they leave out is the care for numbers below 2**-126: some ten instructions an element, more than the memory can
hide, for results that half precisions hold as nothing or next to it.
"""

import triton
import triton.language as tl

from tilestack.contract.backends import interpreting

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def exp_of(x, HALF: tl.constexpr):
    """exp(x); in half precision zero where that is below 2**-126."""
    if HALF:
        y = tl.exp2(1.4426950408889634 * x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def one_over(x, HALF: tl.constexpr):
    """1 / x, for x that are no smaller than 2**-126; in half precision zero where that is below it."""
    if HALF and not INTERPRETED:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1 / x
    return y
