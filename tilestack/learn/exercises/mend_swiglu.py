"""Find the bug: a gated pair that is right for one row, and plausible for all.

    gate, up = the left and the right half of x[r]
    out[r]   = gate · sigmoid(gate) · up                   silu(gate) * up, as in every modern feed-forward layer

               2 · columns                                 columns
             ┌──────────────┬──────────────┐             ┌──────────────┐
    x      0 │  gate        │  up          │     out   0 │              │
           1 │  gate        │  up          │           1 │              │
             └──────────────┴──────────────┘             └──────────────┘

Somebody tried this kernel on a single row, where it is right. Nothing is read outside, nothing is written twice,
nothing is NaN, and from the second row on the numbers look like numbers. They are not those of the definition.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # begin: yours
    # | x_row = x_ptr + row * columns
    x_row = x_ptr + row * 2 * columns
    # end
    out_row = out_ptr + row * columns
    gate = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_row + columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_row + column, gate * tl.sigmoid(gate) * up, mask=inside)


def side_by_side(interleaved):
    return not interleaved or "gate and up side by side only"


@implements(
    ops.swiglu, backend="mine", when=side_by_side, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)  # `when` says what this backend leaves out
def swiglu(x, interleaved):
    x = x.contiguous()
    columns = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        swiglu_kernel[(out.numel() // columns, triton.cdiv(columns, 256))](x, out, columns, BLOCK=256)
    return out


# begin: tutor
HINTS = [
    "Which elements of x does program (1, 0) read for 2 rows of 3 columns? Write down the twelve places of x.",
    "How far is it from the beginning of a row of x to the beginning of the next? And in out?",
    "A row of x holds both halves, so that it has 2 * columns elements: x_row = x_ptr + row * 2 * columns.",
]
# end
