"""Rows that start off 16 bytes, read and written 16 bytes at a time all the same.

With an odd number of columns every row starts somewhere else between two 16-byte borders, and a compiler has to move
its elements one by one. But between its ends lies a body of whole granules, 16 bytes or V elements each:

    · · ·|x x x x x|x x x x x x x x|x x x x x x x x|x x x|· · ·      V = 8 elements of 2 bytes
         |  head   |             body              | tail|

So a row is kept as two tiles: its body, and its ends, head and tail together, fewer than 2V elements that are moved one
by one. Rows a multiple of V apart start alike. A program that strides over the rows by such a multiple has each column
in the same place throughout: what belongs to columns, a weight or its gradient, can stay in registers.

Rows that start differently are added up in different orders. So that a row's norm is its own all the same, sums of the
forward are made of float64 that lie on a grid set by the row's largest magnitude: they add up without rounding, in any
order. It takes a maximum, a conversion and three float64 additions an element, for which data-centre GPUs have the units
and others few. In the backward, which adds up twice as much, that cost more than half of the speed: there a row's gradient
may differ in its last bit from that of an equal row that starts elsewhere, except in the batch-invariant mode, whose
backward moves elements one by one, in one order.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilestack.kernels.tiles import cdiv, next_power, wide

GRANULE = 16  # bytes


@triton.jit
def ragged(row, columns, BODY: tl.constexpr, V: tl.constexpr):
    """(column, inside) of each place in the body of rows that start as this one does, then of each place in their ends."""
    head = (V - row % V * columns % V) % V
    body = (columns - head) // V * V  # seen by the compiler to be a multiple of V, so that no granule is divided
    place, end = tl.arange(0, BODY), tl.arange(0, 2 * V)
    return head + place, place < body, tl.where(end < head, end, end + body), end < columns - body


@triton.jit
def body_of(rows_ptr, row, stride, places, V: tl.constexpr):
    return rows_ptr + tl.cdiv(row * stride, V) * V + tl.arange(0, places[0].shape[0])


@triton.jit
def load_ragged(rows_ptr, row, stride, places, ACC: tl.constexpr, V: tl.constexpr):
    """The body and the ends of a row, zero outside; its number has 64 bits."""
    _, inside, end, end_inside = places
    body = tl.load(body_of(rows_ptr, row, stride, places, V), mask=inside, other=0)
    ends = tl.load(rows_ptr + row * stride + end, mask=end_inside, other=0)
    return body.to(ACC), ends.to(ACC)


@triton.jit
def store_ragged(rows_ptr, row, stride, body, ends, places, V: tl.constexpr):
    _, inside, end, end_inside = places
    dtype = rows_ptr.dtype.element_ty
    tl.store(body_of(rows_ptr, row, stride, places, V), body.to(dtype), mask=inside)
    tl.store(rows_ptr + row * stride + end, ends.to(dtype), mask=end_inside)


@triton.jit
def load_columns(vector_ptr, places):
    """What a vector has for the columns of the body and of the ends."""
    column, inside, end, end_inside = places
    body = tl.load(vector_ptr + column, mask=inside, other=0)
    ends = tl.load(vector_ptr + end, mask=end_inside, other=0)
    return wide(body), wide(ends)


@triton.jit
def grid_of(largest):
    """1.5 · 2^k, in float64, so far above the largest magnitude that what is added to it keeps 37 bits, all on one grid."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (((exponent + (1023 - 127 + 15)).to(tl.int64) << 52) | (1 << 51)).to(tl.float64, bitcast=True)


@triton.jit
def on_grid(x, grid):
    """x rounded to the grid, of which up to 2^14 add up without rounding."""
    return (x.to(tl.float64) + grid) - grid


@triton.jit
def sum_ragged(body, ends):
    return tl.sum(body, 0) + tl.sum(ends, 0)


@triton.jit
def sum_ragged_on_grid(body, ends):
    """The sum of a row, to the bit the same wherever its body begins: on a grid the order of additions does not matter."""
    grid = grid_of(tl.maximum(tl.max(tl.abs(body), 0), tl.max(tl.abs(ends), 0)))
    return (tl.sum(on_grid(body, grid), 0) + tl.sum(on_grid(ends, grid), 0)).to(body.dtype)


@triton.jit
def sum_rows_on_grid(x):
    """The same of each row of a tile."""
    grid = grid_of(tl.max(tl.abs(x), 1, keep_dims=True))
    return tl.sum(on_grid(x, grid), 1, keep_dims=True).to(x.dtype)


def granule_of(columns: int, element_size: int, *matrices: Tensor | None) -> int:
    """V where elements have this size at least, or 0 where rows of these matrices do not start alike, or all on 16 bytes."""
    if columns % 16 == 0:  # all that Triton wants to know of a number
        return 0
    granule = GRANULE // element_size
    alike = all(
        (m.stride(0) - columns) % granule == 0 and m.data_ptr() % GRANULE == 0 for m in matrices if m is not None
    )
    return granule if alike else 0


def body_width(columns: int, granule: int) -> int:
    """The tile that holds any row's body."""
    return next_power(columns // granule * granule)


def programs_that_stride(rows: int, most: int, granule: int) -> int:
    """As many programs as rows, or at most so many, but a multiple of V, so that all rows of a program start alike."""
    return max(min(cdiv(rows, granule), most // granule), 1) * granule
