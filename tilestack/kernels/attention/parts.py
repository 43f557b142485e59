"""Parts of a softmax-weighted sum: how one is put down for others, who merges them, and how.

A part of what a query sees is its largest score, the sum of its exponentials relative to that, in powers of two, and its
weighted values. Parts are merged in one order, so that bits do not depend on which program came last.
"""

import triton
import triton.language as tl

IN_REGISTERS = tl.constexpr(8192)  # numbers that a program holds beside as many sums


@triton.jit
def finite_or_zero(largest):
    """What exponents are taken relative to: the largest score, zero where there is none."""
    return tl.where(largest == float("-inf"), 0.0, largest)


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
def merged_parts(
    rows, parts_ptr, sums_ptr, line, parts,
    PARTS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(the sum of exponentials, the weighted values) of all parts, at most PARTS of them: of the first `rows` of their ROWS
    rows, at most FEW. As many parts are on their way at a time as registers hold, and all are relative to the largest
    score of any, so that none waits for another."""
    AT_ONCE: tl.constexpr = max(min(IN_REGISTERS // (FEW * WIDTH), PARTS), 1)
    row, every = tl.arange(0, FEW), tl.arange(0, PARTS)
    # Past the L1, which knows nothing of what other multiprocessors wrote.
    all_largest = tl.load(
        sums_ptr + (line + every[:, None] * ROWS + row[None, :]) * 2,
        mask=(every < parts)[:, None] & (row < rows)[None, :], other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    at = finite_or_zero(tl.max(all_largest, 0))
    totals = tl.zeros([AT_ONCE, FEW], ACC)
    values = tl.zeros([AT_ONCE, FEW, WIDTH], ACC)
    for first in range(0, parts, AT_ONCE):
        number = first + tl.arange(0, AT_ONCE)
        there = (number < parts)[:, None] & (row < rows)[None, :]
        its_row = line + number[:, None] * ROWS + row[None, :]
        largest = tl.load(sums_ptr + its_row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        its_totals = tl.load(sums_ptr + its_row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        places = parts_ptr + its_row[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        its_values = tl.load(places, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        share = tl.exp2(largest - at[None, :])
        totals += its_totals * share
        values += its_values * share[:, :, None]
    return tl.sum(totals, 0), tl.sum(values, 0)
