"""The noise of a token, from its row's seed and its place: the least of log(exponential) - logit is a draw from the softmax.

Scores are in bits, since the GPU's own logarithm and exponential have base 2.
"""

import triton
import triton.language as tl

from tilestack.kernels.elementwise.arithmetic import INTERPRETED
from tilestack.kernels.elementwise.dropout import random_words

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def log2_of(x):
    """log2 of numbers that are no smaller than 2**-126: one instruction, which is right to 2**-22."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def log2_exponential(word):
    """log2 of the number that `exponential` in `ops/sampling.py` makes of a word."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = 0.2 + u * (0.16666666666666666 + u * 0.14285714285714285)
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * series))))
    logarithm = -0.6931471805599453 * log2_of(tl.maximum(1 - u, 1.1641532182693481e-10))
    return log2_of(tl.where(u < 0.1, series, logarithm))


@triton.jit
def word_of(seed, token, SLAB: tl.constexpr):
    """The word of single tokens: all four of its counter, and one of them chosen."""
    a, b, c, d = random_words(seed, (token // (4 * SLAB)) * SLAB + token % SLAB)
    which = (token // SLAB) % 4
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
