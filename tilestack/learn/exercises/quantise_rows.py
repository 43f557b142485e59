"""Integers and two results: rows as int8 codes with a scale.

    scale[r]    = max over c of |x[r, c]| / 127
    codes[r, c] = x[r, c] / scale[r], rounded to the nearest integer

A number then takes one byte instead of two or four, and x ≈ codes · scale. The row with the largest element 25.4 has
scale 0.2, and 3.05 becomes code 15:

    x[r]       3.05   -25.4    0.09   …      ──▶  codes[r]    15   -127    0   …      int8
                                                  scale[r]    0.2                     float32, one for the row

    program r  ──▶ max of |x| ──▶ scale ──▶ x / scale ──▶ round ──▶ two stores: a vector, and a number

Three details are in the definition: the maximum is taken to be at least 1e-30, so that a row of zeros has a scale;
a row with an infinity or a NaN in it has the scale NaN, and its codes where NaN comes out are 0.

Converting to an integer, `.to(tl.int8)`, drops what is behind the point: round first, with `tl.floor(v + 0.5)`.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def quantise_rows_kernel(x_ptr, codes_ptr, scale_ptr, columns, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    # begin: yours
    # | # Yours: the scale of the row, stored as element `row` of scale; the codes of its elements.
    # | pass
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / 127
    scale = tl.where(tl.sum(x * 0, 0) == 0, scale, float("nan"))  # x * 0 is 0 for every number, else NaN
    code = tl.floor(x / scale + 0.5)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * columns + column, tl.where(code == code, code, 0).to(tl.int8), mask=inside)
    # end


@implements(ops.quantise_rows_int8, backend="mine", dtypes=[torch.float16, torch.bfloat16, torch.float32])
def quantise_rows_int8(x):
    x = x.contiguous()
    columns = x.shape[-1]
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        WIDTH = triton.next_power_of_2(columns)
        quantise_rows_kernel[(scale.numel(),)](x, codes, scale, columns, WIDTH=WIDTH)
    return codes, scale


# begin: tutor
HINTS = [
    "scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / 127; one number is stored with tl.store(scale_ptr + row, scale).",
    "code = tl.floor(x / scale + 0.5), and only then .to(tl.int8). A cast alone rounds towards zero.",
    "NaN and infinities: `tl.sum(x * 0, 0) == 0` is false for a row that has one, so that scale = tl.where(that, scale, "
    'float("nan")) is right; code == code is false where code is NaN, which finds the codes to set to 0.',
]
MISTAKES = {
    "the scale is the largest element itself, not divided by 127": (
        lambda x: (x / x.abs().amax(-1, keepdim=True), x.abs().amax(-1))
    ),
    "it is divided by 128": (lambda x: (x / (x.abs().amax(-1, keepdim=True) / 128), x.abs().amax(-1) / 128)),
    "the largest element is sought without `tl.abs`": (
        lambda x: (x / (x.amax(-1, keepdim=True) / 127), x.amax(-1) / 127)
    ),
}
# end
