"""A linear layer of one to four rows: every number of the weight is read once, and that is all the time it takes.

    out[m, n] = Σ_k x[m, k] · weight[n, k] + bias[n]

              K →                      A program owns BLOCK_N rows of the weight and walks along them, BLOCK_K at a time.
    weight  +-----+-----+-----+        Each thread multiplies what it loads with the same part of every row of x and adds
      N     |  →  |  →  |  →  |        it to sums of its own; they are added up over threads once, at the end. No tile of
            +-----+-----+-----+        a tensor core is filled with rows that do not exist.
            |     |     |     |

Two multiply-adds a byte are nothing to the arithmetic units: what counts is how many bytes are on their way at a time. So
there are few rows to a program and many programs, N / BLOCK_N of them, and the weights are asked for while the kernel in
front still computes x (kernels/early.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import early, fetch_rows, pieces_of, wait_for_last
from tilestack.kernels.matmul.pipelined import linear_backward
from tilestack.kernels.matmul.products import has_at_most, linear_by
from tilestack.kernels.tiles import accumulator, cdiv, next_power

MOST_ROWS = 4  # of x


class Config(NamedTuple):
    """Rows of the weight to a program, how many of their elements at a time, and warps."""

    n: int
    k: int
    warps: int


CONFIGS = {
    "2x512": Config(2, 512, 4),
    "1x1024": Config(1, 1024, 4),
    "2x1024": Config(2, 1024, 4),
    "4x512": Config(4, 512, 4),
    "4x1024": Config(4, 1024, 8),
    "1x512": Config(1, 512, 2),
    "8x256": Config(8, 256, 4),
}


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,  # [M, K], [K, N], [N] or None, [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_k, weight_stride_n,
    EARLY: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
    ACC: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    fetch_rows(weight_ptr, tl.program_id(0) * BLOCK_N, N, weight_stride_n, BLOCK_N, PIECES, BYTES)
    wait_for_last(EARLY)
    m = tl.arange(0, ROWS)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptr += m[:, None] * tl.cast(x_stride_m, tl.int64) + k[None, :] * x_stride_k
    weight_ptr += n[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    total = tl.zeros([ROWS, BLOCK_N, BLOCK_K], ACC)
    for start in range(0, K, BLOCK_K):
        has_x = (m < M)[:, None]
        has_weight = (n < N)[:, None]
        if not EVEN_K:
            has_x = has_x & (k < K - start)[None, :]
            has_weight = has_weight & (k < K - start)[None, :]
        weight = tl.load(weight_ptr, mask=has_weight, other=0, eviction_policy="evict_first").to(ACC)
        x = tl.load(x_ptr, mask=has_x, other=0).to(ACC)
        total += x[:, None, :] * weight[None, :, :]
        x_ptr += tl.cast(x_stride_k, tl.int64) * BLOCK_K
        weight_ptr += tl.cast(weight_stride_k, tl.int64) * BLOCK_K
    out = tl.sum(total, 2)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < N, other=0).to(ACC)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def gemv(x: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """x @ b + bias for few rows of x; b is a weight's transpose, whose columns are best contiguous."""
    (M, K), N = x.shape, b.shape[1]
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    pieces, size = pieces_of(b.T, config.n, K, config.warps)
    launch(
        gemv_kernel, (cdiv(N, config.n),), x, b, bias, out, M, N, K, *x.stride(), *b.stride(),
        PIECES=pieces, BYTES=size, ACC=accumulator(x.dtype), EVEN_K=K % config.k == 0,
        ROWS=next_power(M), BLOCK_N=config.n, BLOCK_K=config.k, num_warps=config.warps, **early(x),
    )  # fmt: skip
    return out


@implements(
    ops.linear,
    backend="triton_gemv",
    repeat=straight_line,
    backward=linear_backward,
    when=lambda x: has_at_most(MOST_ROWS, x),
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(lambda a, b, c: gemv(a, b, c, config), x, weight, bias)
