"""Second rung: the tiles of the naive product in an order that finds more of A and B in the L2 cache.

A GPU works on some hundred tiles of C at a time. Taken row by row, they need one row of A's tiles and all columns of B,
which the cache has lost when the next row begins. Taken in bands BAND tiles high, column by column, they form a block that
needs as few rows of A as columns of B:

      row by row                        in bands, BAND = 3
      0  1  2  3  4  5  6  7            0  3  6  9 12 15 18 21        eight tiles at work
      8  9 10 11 12 13 14 15            1  4  7 10 13 16 19 22        row by row: 1 row of A, 8 columns of B
     16 17 18 19 20 21 22 23            2  5  8 11 14 17 20 23        in bands:   3 rows of A, 3 columns of B

What a program does is unchanged; which tile it does comes from its number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.naive import block_of_product, store_with_bias, tile_of_product
from tilestack.kernels.matmul.products import linear_by, linear_gradients_by
from tilestack.kernels.tiles import accumulator, cdiv

BAND = 8  # tiles: of the 132 that an H200 has at work, a block of about 8 x 16


@triton.jit
def tile_in_bands(number, M, N, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column, in tiles, of the tile with this number; the last band may be less high."""
    rows = tl.cdiv(M, BLOCK_M)
    of_a_band = BAND * tl.cdiv(N, BLOCK_N)
    first = number // of_a_band * BAND
    height = tl.minimum(rows - first, BAND)
    within = number % of_a_band
    return first + within % height, within // height


@triton.jit
def matmul_ordered_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr,  # [M, K], [K, N], [N] or None, [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    ACC: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    total, m, n = tile_of_product(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
        False, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_with_bias(total, m, n, bias_ptr, c_ptr, M, N)


def ordered_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias for matrices of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    block = block_of_product(a, b)
    grid = (cdiv(M, block["BLOCK_M"]) * cdiv(N, block["BLOCK_N"]),)
    launch(
        matmul_ordered_kernel, grid, a, b, bias, c, M, N, K, *a.stride(), *b.stride(),
        ACC=accumulator(a.dtype), BAND=BAND, **block, num_stages=1,
    )  # fmt: skip
    return c


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    return linear_gradients_by(ordered_product, grad, x, weight, bias, needs)


@implements(ops.linear, backend="triton_ordered", repeat=straight_line, backward=linear_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by(ordered_product, x, weight, bias)
