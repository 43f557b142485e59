"""What the gradient of a norm needs to know of a row, from one visit to it: mean, 1 / std and two averages.

    a row     |   chunk 0   |   chunk 1   | … |   chunk C-1   |     each a tile of COLS columns, the next ones on their way
                  ↓ lanes       ↓                               added up lane by lane over the chunks, then along the lanes

A lane's values are few, one of each chunk, so sums around the first of them (its pivot) lose no digits, and a centred row
needs no visit of its own for its mean. With n values in a lane and δ the average of x - pivot among them,

    Σ (x - mean)²    = Σ_lanes [ Σ (x - pivot)² - n · δ² + n · (pivot + δ - mean)² ]
    Σ g · (x - mean) = Σ_lanes [ Σ g · (x - pivot) + (pivot - mean) · Σ g ]
"""

import triton
import triton.language as tl

from tilestack.kernels.tiles import sum_three, sum_two


@triton.jit
def row_averages(
    x_ptr, grad_ptr, weight_ptr, columns, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """mean, rstd, avg(g · x̂), avg(g) of a row that is at least COLS wide; the first and last are 0 where it is not centred."""
    lane = tl.arange(0, COLS)
    pivot = tl.zeros([COLS], ACC)
    if CENTRED:
        pivot = tl.load(x_ptr + lane).to(ACC)
    first = tl.zeros([COLS], ACC)  # Σ x - pivot
    second = tl.zeros([COLS], ACC)  # Σ (x - pivot)²
    along = tl.zeros([COLS], ACC)  # Σ g · (x - pivot)
    total = tl.zeros([COLS], ACC)  # Σ g
    for start in tl.range(0, columns, COLS, num_stages=STAGES):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=0).to(ACC)
        g = tl.load(grad_ptr + start + lane, mask=inside, other=0).to(ACC)
        if HAS_WEIGHT:
            g = g * tl.load(weight_ptr + start + lane, mask=inside, other=0).to(ACC)
        if CENTRED:
            x = tl.where(inside, x - pivot, 0.0)
            first += x
            total += g
        second += x * x
        along += g * x
    if CENTRED:
        filled = ((columns - lane + COLS - 1) // COLS).to(ACC)  # chunks that have a column in the lane
        mean = tl.sum(filled * pivot + first, 0) / columns
        offset = first / filled
        away = pivot + offset - mean
        squares, product, gradients = sum_three(
            second - first * offset + filled * away * away, along + (pivot - mean) * total, total
        )
        average = gradients / columns
    else:
        squares, product = sum_two(second, along)
        mean = tl.zeros([], ACC)
        average = tl.zeros([], ACC)
    rstd = tl.rsqrt(squares / columns + eps)
    return mean, rstd, product * rstd / columns, average
