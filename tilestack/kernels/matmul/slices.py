"""A linear layer of up to 32 rows on tensor cores whose weight has few rows too: each warp adds up a slice of K.

    out[m, n] = Σ_slice Σ_k x[m, slice, k] · weight[n, slice, k] + bias[n]

A layer of 1024 outputs is 128 tiles of 8 columns, as narrow as tensor cores multiply, so every multiprocessor has weights
to read without programs that share a sum through memory (split_k.py), which would take longer than the product itself. In
such a tile there is work for a single warp; so the warps of a program share the sum along K among themselves:

              K: step 0            | step 1                    A step is one product of a stack of matrices, a matrix to
    weight  +----+----+----+----+--+----+----+----+----+       each warp: [WARPS, M, BLOCK_K] · [WARPS, BLOCK_K, BLOCK_N].
    BLOCK_N | w0 | w1 | w2 | w3 |  | w0 | w1 | w2 | w3 |       At the end the warps' totals are added up in shared memory,
            +----+----+----+----+--+----+----+----+----+       always in the same order.

Every program reads all of x, from the L2 cache: this is for few rows of it. The weights are asked for while the kernel in
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
from tilestack.kernels.matmul.naive import store_with_bias
from tilestack.kernels.matmul.pipelined import linear_backward
from tilestack.kernels.matmul.products import HALVES, has_at_most, linear_by
from tilestack.kernels.tiles import cdiv, next_power, shared_memory
from tilestack.tuning.model import Gpu, product_us

MOST_ROWS = 32  # of x
LEAST_ROWS = 16  # of a tile that tensor cores multiply
DIVISOR = 16  # what Triton knows a length to be a multiple of, or not: only such rows are loaded in vectors
ITEM_BYTES = 2  # of float16 and bfloat16


class Config(NamedTuple):
    """Columns of a tile, a warp's step along K, warps, and the most steps under way."""

    n: int
    k: int
    warps: int
    stages: int

    def stages_in(self, memory: int, rows: int) -> int:
        """As many steps as there is shared memory to keep them in while one more is multiplied."""
        return min(self.stages, 1 + memory // (self.warps * (self.n + rows) * self.k * ITEM_BYTES))

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        return product_us(M, N, K, max(next_power(M), LEAST_ROWS), self.n, gpu)


CONFIGS = {"8x64x4": Config(8, 64, 4, stages=6), "16x128x4": Config(16, 128, 4, stages=4)}


@triton.jit
def matmul_slices_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr,  # [M, K], [K, N], [N] or None, [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    EARLY: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    fetch_rows(b_ptr, tl.program_id(0) * BLOCK_N, N, b_stride_n, BLOCK_N, PIECES, BYTES)
    wait_for_last(EARLY)
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    warp = tl.arange(0, WARPS).to(tl.int64)[:, None, None] * BLOCK_K
    m = tl.arange(0, BLOCK_M)[None, :, None]
    n = first + tl.arange(0, BLOCK_N)[None, None, :]
    a_k = warp + tl.arange(0, BLOCK_K)[None, None, :]
    b_k = warp + tl.arange(0, BLOCK_K)[None, :, None]
    a_ptr += m * tl.cast(a_stride_m, tl.int64) + a_k * a_stride_k
    b_ptr += b_k * b_stride_k + n * b_stride_n
    totals = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, WARPS * BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptr, mask=m < M, other=0)
            b = tl.load(b_ptr, mask=n < N, other=0)
        else:
            a = tl.load(a_ptr, mask=(m < M) & (a_k < K - start), other=0)
            b = tl.load(b_ptr, mask=(n < N) & (b_k < K - start), other=0)
        totals = tl.dot(a, b, totals)
        a_ptr += tl.cast(a_stride_k, tl.int64) * (WARPS * BLOCK_K)
        b_ptr += tl.cast(b_stride_k, tl.int64) * (WARPS * BLOCK_K)
    rows = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    columns = first + tl.arange(0, BLOCK_N)[None, :]
    store_with_bias(tl.sum(totals, 0), rows, columns, bias_ptr, c_ptr, M, N)


def sliced_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """a @ b + bias for up to 32 rows of a; b is a weight's transpose."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    rows = max(next_power(M), LEAST_ROWS)
    pieces, size = pieces_of(b.T, config.n, K, config.warps)
    launch(
        matmul_slices_kernel, (cdiv(N, config.n),), a, b, None if bias is None else bias.contiguous(), c,
        M, N, K, *a.stride(), *b.stride(),
        PIECES=pieces, BYTES=size, EVEN_K=K % (config.k * config.warps) == 0,
        BLOCK_M=rows, BLOCK_N=config.n, BLOCK_K=config.k, WARPS=config.warps,
        num_warps=config.warps, num_stages=config.stages_in(shared_memory(a.device), rows), **early(a),
    )  # fmt: skip
    return c


def takes(x: Tensor, weight: Tensor) -> bool | str:
    *steps, side_by_side = x.stride()
    apart, weight_side_by_side = weight.stride()
    if side_by_side != 1 or weight_side_by_side != 1 or any(size % DIVISOR for size in (x.shape[-1], apart, *steps)):
        return f"x and weight must have contiguous rows of a multiple of {DIVISOR} elements"
    return has_at_most(MOST_ROWS, x)


@implements(
    ops.linear,
    backend="triton_slices",
    repeat=straight_line,
    backward=linear_backward,
    when=takes,
    dtypes=HALVES,
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(lambda a, b, c: sliced_product(a, b, c, config), x, weight, bias)
