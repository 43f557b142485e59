"""Sums of a row that are the same to the bit in whatever order its terms are added up.

Where rows start in different places between two 16-byte borders, their elements lie in different threads, and float sums
would round differently. Integers do not round. A term becomes one by a single addition: 1.5 · 2^k plus what is no larger
than 2^(k-1) has the bits

    | exponent of 2^k | 1 | term / 2^(k-23), rounded: 22 bits, those of 1.5 · 2^k where it is zero |

so the difference of the bits is the term in units of 2^(k-23). A square is added in the same instruction that makes it. The
largest magnitude of the row says what k is: a term keeps 22 bits below it, enough for bfloat16, and in other rows 23 more, of
what was rounded off. In float64, which would keep 37 bits, a term is a conversion and three additions, of which a
multiprocessor does few.

Rows with terms beyond 2^126 have an infinite sum.
"""

import triton
import triton.language as tl

from tilestack.kernels.tiles import INTERPRETED


@triton.jit
def larger(a, b):
    """The larger of two numbers; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_and_smaller(high, low, other_high, other_low):
    return larger(high, other_high), tl.minimum(low, other_low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The largest element, of all or along an axis; NaN if one of them is."""
    if INTERPRETED:
        strange = tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims)
        return tl.where(strange > 0, float("nan"), tl.max(x, axis, keep_dims=keep_dims))
    else:
        return tl.reduce(x, axis, larger, keep_dims)


@triton.jit
def extremes(high, low, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The largest of the one and the smallest of the other in a single exchange among warps; NaN where there is one."""
    if INTERPRETED:
        return largest(high, axis, keep_dims), tl.min(low, axis, keep_dims=keep_dims)
    else:
        return tl.reduce((high, low), axis, larger_and_smaller, keep_dims)


@triton.jit
def farthest(high, low, centre):
    """How far from a centre the element of a row is that is farthest, given the row's extremes."""
    return larger(tl.abs(high - centre), tl.abs(low - centre))


@triton.jit
def exponent_above(largest, FINE: tl.constexpr):
    """The exponent, with its bias, of the 2^k to be added to terms of that magnitude, one that float32 has. FINE ones get
    another grid 23 bits below."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.minimum(tl.maximum(exponent + 2, 24 if FINE else 2), 254)


@triton.jit
def integers(x, largest, SQUARED: tl.constexpr, FINE: tl.constexpr):
    """x or its squares, of which this is the largest magnitude, as whole numbers of the unit of `unit_of`."""
    grid = ((exponent_above(largest, FINE) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    near = tl.fma(x, x, grid) if SQUARED else x + grid
    whole = near.to(tl.int32, bitcast=True) - grid.to(tl.int32, bitcast=True)
    if FINE:
        left = tl.fma(x, x, grid - near) if SQUARED else x + (grid - near)
        finer = grid * (1.0 / (1 << 23))
        more = (left + finer).to(tl.int32, bitcast=True) - finer.to(tl.int32, bitcast=True)
        whole = (whole.to(tl.int64) << 23) + more
    return whole


@triton.jit
def from_integers(whole, largest, FINE: tl.constexpr):
    """A sum of such numbers as a float32; infinity, or NaN, where the largest magnitude is, or nearly."""
    shift: tl.constexpr = 1023 - 127 - (46 if FINE else 23)
    unit = ((exponent_above(largest, FINE) + shift).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    total = (whole.to(tl.float64) * unit).to(tl.float32)
    return tl.where(largest < 8.507059173023462e37, total, largest * float("inf"))


@triton.jit
def sum_of_rows(x, largest, SQUARED: tl.constexpr, FINE: tl.constexpr):
    """The sum of each row of a tile."""
    whole = tl.sum(integers(x, largest, SQUARED, FINE).to(tl.int64), 1, keep_dims=True)
    return from_integers(whole, largest, FINE)


@triton.jit
def sum_of_granules(body, ends, largest, SQUARED: tl.constexpr, FINE: tl.constexpr):
    """The sum of a row that is a [granules, V] tile and its ends."""
    whole = tl.sum(tl.sum(integers(body, largest, SQUARED, FINE), 1).to(tl.int64), 0)  # a granule's fits 32 bits
    whole += tl.sum(integers(ends, largest, SQUARED, FINE).to(tl.int64), 0)
    return from_integers(whole, largest, FINE)
