"""Tiles in two dimensions: transpose a matrix.

    out[j, i] = x[i, j]                        in PyTorch: x.mT.contiguous()

A program takes a square tile of x and puts it, turned over, where it belongs in out:

          x [rows, columns]                  out [columns, rows]
        ┌─────┬─────┬───┐                  ┌─────┬─────┐
        │     │▒▒▒▒▒│   │  row block 0     │     │     │
        │     │▒▒▒▒▒│   │                  ├─────┼─────┤
        ├─────┼─────┼───┤                  │▒▒▒▒▒│     │  row block 1
        │     │     │   │                  │▒▒▒▒▒│     │
        └─────┴─────┴───┘                  ├─────┼─────┤
         column block 1                    └─────┴─────┘

Memory is one line of elements. Element [i, j] of a matrix with `columns` columns is at i * columns + j. Two vectors
of indices make a tile of addresses by broadcasting, as in PyTorch: row[:, None] * columns + column[None, :].

The grid has three dimensions: blocks of rows, blocks of columns, and the matrix of a batch (given below).
Why a tile and not single elements? Neighbours in memory are fetched together; a tile uses what was fetched for
its rows when it reads, and for its columns when it writes.
"""

import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64) * rows * columns  # where the matrix of this program begins, in x and in out
    # begin: yours
    # | # Yours: the row and column numbers of the tile, two vectors of TILE; load the tile of x; store it transposed.
    # | pass
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x_ptr + matrix + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out_ptr + matrix + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))
    # end


def transpose_backward(grad):
    return grad.mT


@implements(ops.transpose, backend="mine", backward=transpose_backward)
def transpose(x):
    x = x.contiguous()
    *batch, rows, columns = x.shape
    out = x.new_empty(*batch, columns, rows)
    if x.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, 32), x.numel() // (rows * columns))
        transpose_kernel[grid](x, out, rows, columns, TILE=32)
    return out


# begin: tutor
HINTS = [
    "row = tl.program_id(0) * TILE + tl.arange(0, TILE), likewise column from program_id(1). The mask has two parts: "
    "(row[:, None] < rows) & (column[None, :] < columns).",
    "out has `rows` columns: its element [j, i] is at j * rows + i. In the tile of addresses for the store, column "
    "numbers go down (`[:, None]`) and row numbers across (`[None, :]`).",
    "`tl.trans` turns a tile over, and the mask with it: tl.store(out_ptr + matrix + column[:, None] * rows + "
    "row[None, :], tl.trans(tile), mask=tl.trans(inside)).",
]
MISTAKES = {
    "the elements keep their order in memory, and only the shape changes": lambda x: x.reshape(x.mT.shape),
    "every program reads the first matrix of the batch, for want of `matrix` in an address": (
        lambda x: x.flatten(0, -3)[:1].mT.expand_as(x.flatten(0, -3).mT).reshape(x.mT.shape)
    ),
}
# end
