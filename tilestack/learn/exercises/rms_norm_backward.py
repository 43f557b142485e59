"""A sum across programs: the gradients of RMS norm.

With r = 1 / sqrt(mean(x²) + eps) for each row, n = x · r and g = grad · weight:

    dx[r]      = r · (g - n · mean(g · n))               a row by itself, as in the forward
    dweight[c] = sum over rows of grad[r, c] · n[r, c]   every row adds to every column

Different programs have the rows, so that none of them can make dweight alone, and no order is promised in which they
run. Here a second kernel goes the other way: a program has a block of columns, and loops over the rows.

               columns                                 columns
             ┌──────────────┐                        ┌────┬────┬────┐
    dx:    0 │ ▒▒▒▒▒▒▒▒▒▒▒▒ │ program 0   dweight:   │ ▒▒ │    │    │ 0
           1 │              │ program 1              │ ▒▒ │    │    │ 1   rows, in a loop
           2 │              │ program 2              │ ▒▒ │    │    │ 2
             └──────────────┘                        └────┴────┴────┘
                                                     program 0

The first kernel leaves r of each row in `scale`, so that the second need not make it again. The forward is given.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def rms_norm_fwd_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * columns + column, out, mask=inside)


@triton.jit
def rms_norm_dx_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, scale_ptr, columns, eps, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    # begin: yours
    # | # Yours: r, n and g of the row; store dx, and r as element `row` of scale.
    # | pass
    column = tl.arange(0, WIDTH)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    n = x * r
    tl.store(dx_ptr + row * columns + column, r * (g - n * (tl.sum(g * n, 0) / columns)), mask=inside)
    tl.store(scale_ptr + row, r)
    # end


@triton.jit
def rms_norm_dweight_kernel(grad_ptr, x_ptr, scale_ptr, dweight_ptr, rows, columns, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # begin: yours
    # | # Yours: the sum over all rows of grad · x · scale, for this block of columns.
    # | pass
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(rows):
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        total += grad * x * tl.load(scale_ptr + row)
    tl.store(dweight_ptr + column, total, mask=inside)
    # end


def rms_norm_backward(grad, x, weight, eps):
    grad, x = grad.contiguous(), x.contiguous()
    weight = weight if weight is None else weight.contiguous()
    dx, columns = torch.empty_like(x), x.shape[-1]
    dweight = weight if weight is None else torch.zeros_like(weight)
    if x.numel():
        rows, has_weight = x.numel() // columns, weight is not None
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        WIDTH = triton.next_power_of_2(columns)
        rms_norm_dx_kernel[(rows,)](grad, x, weight, dx, scale, columns, eps, HAS_WEIGHT=has_weight, WIDTH=WIDTH)
        if has_weight:
            rms_norm_dweight_kernel[(triton.cdiv(columns, 256),)](grad, x, scale, dweight, rows, columns, BLOCK=256)
    return dx, dweight


@implements(
    ops.rms_norm, backend="mine", backward=rms_norm_backward, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)
def rms_norm(x, weight, eps):
    x = x.contiguous()
    weight = weight if weight is None else weight.contiguous()
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    out, columns = torch.empty_like(x, dtype=dtype), x.shape[-1]
    if x.numel():
        rms_norm_fwd_kernel[(x.numel() // columns,)](
            x, weight, out, columns, eps, HAS_WEIGHT=weight is not None, WIDTH=triton.next_power_of_2(columns)
        )
    return out


# begin: tutor
HINTS = [
    "dx first: load x and grad of the row as the forward loads x, and make r as the forward does. g is grad, times the "
    "weight if HAS_WEIGHT.",
    "mean(g · n) is tl.sum(g * n, 0) / columns. Store r * (g - n * that) as dx, and r with tl.store(scale_ptr + row, r).",
    "dweight: total = tl.zeros((BLOCK,), tl.float32); for row in range(rows): load x and grad of that row at `column`, "
    "total += grad * x * tl.load(scale_ptr + row). There is no weight in it.",
]


def r_of(x, eps):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


MISTAKES = {
    "r is taken for a constant: the part with mean(g · n) is missing": (
        lambda x, weight, eps: x * r_of(x, eps).detach() * (1 if weight is None else weight)
    ),
    "the weight is missing in g": lambda x, eps: x * r_of(x, eps),
}
# end
