"""The tensor core: a linear layer, tile by tile.

    out[m, n] = sum over k of x[m, k] · weight[n, k] + bias[n]               torch.nn.functional.linear(x, weight, bias)

A program makes one tile of the result. It walks along K, loads a tile of x and one of weight at each step, and lets
`tl.dot` multiply them and add the product to its tile of sums:

                          weight [N, K], read as [K, N]
                                ┌────┬─────┬────┐
                                │    │▒▒▒▒▒│    │ ◀─ step
                                │    │  ↓  │    │
                                └────┴─────┴────┘
           x [M, K]                out [M, N]
         ┌──────────────┐       ┌────┬─────┬────┐
         │▒▒▒▒▒ →       │       │    │█████│    │  one program
         ├──────────────┤       ├────┼─────┼────┤
         │              │       │    │     │    │
         └──────────────┘       └────┴─────┴────┘

A tile of 32 × 32 sums needs 64 numbers for each k, and does 1024 multiplications with them. That is why matrix
products are bound by arithmetic where everything before was bound by memory.

`weight` is [N, K]: element [n, k] is at n * K + k. A tile with k downwards and n across is loaded with
n[None, :] * K + k[:, None]. Beyond K, both must be zero. `input_precision="ieee"` makes a GPU multiply float32 exactly.

A thousand float32 products, added one after the other, lose digits; short sums, added to each other, lose fewer. So the
product of a step is made by itself and then added. Triton would join the two: `max_num_imprecise_acc=1` forbids it.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    # begin: yours
    # | # Yours: a tile of zeros in float32; along K in steps of STEP, tl.dot of two tiles; the bias; the store.
    # | pass
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        weight = tl.load(weight_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        total += tl.dot(x, weight, input_precision="ieee", max_num_imprecise_acc=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))
    # end


@implements(ops.linear, backend="mine", dtypes=[torch.float16, torch.bfloat16, torch.float32])
def linear(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    N, K = weight.shape
    out = x.new_empty(*x.shape[:-1], N)
    if out.numel():
        M = out.numel() // N
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
        linear_kernel[grid](x, weight, bias, out, M, N, K, HAS_BIAS=bias is not None, TILE=32, STEP=32)
    return out


# begin: tutor
HINTS = [
    "total = tl.zeros((TILE, TILE), tl.float32), then a loop over range(0, K, STEP) with k = start + tl.arange(0, STEP).",
    "x's tile is [TILE, STEP]: m[:, None] * K + k[None, :], with the mask (m[:, None] < M) & (k[None, :] < K) and "
    "other=0.0. weight's is [STEP, TILE]: n[None, :] * K + k[:, None], masked likewise.",
    'total += tl.dot(x, weight, input_precision="ieee", max_num_imprecise_acc=1). After the loop, if HAS_BIAS: total += '
    "tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]. Store at m[:, None] * N + n[None, :].",
]
MISTAKES = {
    "weight is read as if it were [K, N]": (
        lambda x, weight, bias: x @ weight.reshape(weight.mT.shape) + (0 if bias is None else bias)
    ),
    "the bias is left out": lambda x, weight: x @ weight.mT,
    "only the first 32 of K are multiplied": (
        lambda x, weight, bias: x[..., :32] @ weight[:, :32].mT + (0 if bias is None else bias)
    ),
    "each step replaces the sums of the one before": (
        lambda x, weight, bias: (
            x[..., (x.shape[-1] - 1) // 32 * 32 :] @ weight[:, (x.shape[-1] - 1) // 32 * 32 :].mT
            + (0 if bias is None else bias)
        )
    ),
}
# end
