"""Rows that start off 16 bytes, read and written 16 bytes at a time all the same.

With an odd number of columns every row starts somewhere else between two 16-byte borders, and a compiler has to move
its elements one by one. But between its ends lies a body of whole granules, 16 bytes or V elements each:

    · · ·|x x x x x|x x x x x x x x|x x x x x x x x|x x x|· · ·      V = 8 elements of 2 bytes
         |  head   |             body              | tail|

So a row is kept as two tiles: its body, a granule to a line, and its ends, head and tail together, fewer than 2V elements
that are moved one by one. Rows a multiple of V apart start alike. A program that strides over the rows by such a multiple has
each column in the same place throughout: what belongs to columns, a weight or its gradient, can stay in registers.

Rows that start differently are added up in different orders. So that a row's norm is its own all the same, the forward adds
up integers (`order_free.py`). In the backward, which adds up twice as much, a row's gradient may differ in its last bit from
that of an equal row that starts elsewhere, except in the batch-invariant mode, whose backward moves elements one by one, in
one order.
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
    body = (columns - head) // V * V
    line, end = tl.arange(0, BODY // V)[:, None] * V, tl.arange(0, 2 * V)
    column = head + line + tl.arange(0, V)[None, :]
    return column, line < body, tl.where(end < head, end, end + body), end < columns - body


@triton.jit
def body_of(rows_ptr, row, stride, places, V: tl.constexpr):
    G: tl.constexpr = places[0].shape[0]
    place = tl.arange(0, G)[:, None] * V + tl.arange(0, V)[None, :]
    return rows_ptr + tl.cdiv(row * stride, V) * V + place


@triton.jit
def load_body(rows_ptr, row, stride, places, V: tl.constexpr):
    """The body of a row, zero outside; its number has 64 bits."""
    return tl.load(body_of(rows_ptr, row, stride, places, V), mask=places[1], other=0)


@triton.jit
def load_ends(rows_ptr, row, rows, stride, places):
    """The ends of a row, zero outside and where there is no such row."""
    _, _, end, end_inside = places
    return tl.load(rows_ptr + row * stride + end, mask=end_inside & (row < rows), other=0)


@triton.jit
def load_ragged(rows_ptr, row, stride, places, ACC: tl.constexpr, V: tl.constexpr):
    """The body and the ends of a row, zero outside; its number has 64 bits."""
    body = load_body(rows_ptr, row, stride, places, V)
    ends = tl.load(rows_ptr + row * stride + places[2], mask=places[3], other=0)
    return body.to(ACC), ends.to(ACC)


@triton.jit
def store_ragged(rows_ptr, row, stride, body, ends, places, V: tl.constexpr):
    _, inside, end, end_inside = places
    dtype = rows_ptr.dtype.element_ty
    tl.store(body_of(rows_ptr, row, stride, places, V), body.to(dtype), mask=inside)
    tl.store(rows_ptr + row * stride + end, ends.to(dtype), mask=end_inside)


@triton.jit
def load_columns(vector_ptr, places):
    """What a vector has for the columns of the body, as it is stored, and of the ends."""
    column, inside, end, end_inside = places
    return tl.load(vector_ptr + column, mask=inside, other=0), wide(tl.load(vector_ptr + end, mask=end_inside, other=0))


@triton.jit
def sum_ragged(body, ends):
    return tl.sum(body) + tl.sum(ends, 0)


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
