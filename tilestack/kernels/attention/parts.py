"""Parts of a softmax-weighted sum: how one is put down for others, who merges them, and how.

A part of what a query sees is its largest score, the sum of its exponentials relative to that, in powers of two, and its
weighted values. Parts are merged in their order, so that bits do not depend on which program came last.
"""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(largest):
    """What exponents are taken relative to: the largest score, zero where there is none."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def merge(largest, total, values, other_largest, other_total, other_values):
    """Two parts as one."""
    common = tl.maximum(largest, other_largest)
    at = finite_or_zero(common)
    mine, its = tl.exp2(largest - at), tl.exp2(other_largest - at)
    return common, total * mine + other_total * its, values * mine[:, None] + other_values * its[:, None]


@triton.jit
def store_part(largest, total, values, inside, parts_ptr, sums_ptr, line, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A part for others to merge: its rows from `line` on, those that there are."""
    row = line + tl.arange(0, ROWS)
    tl.store(parts_ptr + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], values, mask=inside[:, None])
    tl.store(sums_ptr + row * 2, largest, mask=inside)
    tl.store(sums_ptr + row * 2 + 1, total, mask=inside)


@triton.jit
def comes_last(count_ptr, programs):
    """Whether all others of so many programs have been here, and what they stored before can be read."""
    tl.debug_barrier()  # all threads of this program have stored before one of them counts
    is_last = tl.atomic_add(count_ptr, 1, sem="acq_rel") == programs - 1
    tl.debug_barrier()
    if is_last:
        tl.store(count_ptr, 0)  # as the next call expects it
    return is_last


@triton.jit
def merged_parts(inside, parts_ptr, sums_ptr, line, parts, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(the sum of exponentials, the weighted values) of all parts, in their order; of few rows, four are on their way."""
    AT_ONCE: tl.constexpr = 4 if ROWS == 16 else 1
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    values = tl.zeros([ROWS, WIDTH], ACC)
    for first in range(0, parts, AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            there = inside & (first + part < parts)
            row = line + (first + part) * ROWS + tl.arange(0, ROWS)
            # Past the L1, which knows nothing of what other multiprocessors wrote.
            its_largest = tl.load(sums_ptr + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            its_total = tl.load(sums_ptr + row * 2 + 1, mask=there, other=0, cache_modifier=".cg")
            places = parts_ptr + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            its_values = tl.load(places, mask=there[:, None], other=0, cache_modifier=".cg")
            largest, total, values = merge(largest, total, values, its_largest, its_total, its_values)
    return total, values
