"""The first half of a gated feed-forward layer for up to 64 rows, as in decoding: `gated.py` with the sum along K shared out.

A tile is the gate's beside that of up, so that whoever has all of its parts (`split_k.py`) has both halves of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import fetch_rows, wait_for_last
from tilestack.kernels.matmul.gated import linear_swiglu_backward, store_gated
from tilestack.kernels.matmul.naive import sum_along_k
from tilestack.kernels.matmul.products import has_at_most
from tilestack.kernels.matmul.split_k import MOST_ROWS, Config, is_last_part, launch_split_k, part_of_k, sum_of_parts
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.autocast import lowered

SHAPES = ((32, 128, 1), (64, 64, 1), (64, 64, 4), (32, 128, 2))
CONFIGS = {f"{n}x{k}x{splits}": Config(n, k, splits) for n, k, splits in SHAPES}


@triton.jit
def linear_swiglu_split_k_kernel(
    x_ptr, weight_ptr, bias_ptr, parts_ptr, counts_ptr, out_ptr,  # [M, K], [K, 2N], [2N] or None, [SPLITS, M, 2N], [tiles], [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_k, weight_stride_n,
    EARLY: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part, first, length = part_of_k(K, SPLITS, BLOCK_K)
    for half in tl.static_range(2):
        rows = weight_ptr + first * weight_stride_k + tl.cast(half * N, tl.int64) * weight_stride_n
        fetch_rows(rows, tile * BLOCK_N, N, weight_stride_n, BLOCK_N, PIECES, BYTES)
    wait_for_last(EARLY)
    m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    first_n = tile.to(tl.int64) * BLOCK_N
    column = tl.arange(0, 2 * BLOCK_N)[None, :]  # of the gate, then of up
    of_tile = first_n + column % BLOCK_N
    row_of_weight = of_tile + tl.where(column < BLOCK_N, 0, N)
    both = sum_along_k(
        x_ptr + first * x_stride_k + m * x_stride_m, weight_ptr + first * weight_stride_k + row_of_weight * weight_stride_n,
        m < M, of_tile < N, length, x_stride_k, weight_stride_k, EVEN_K, ACC, BLOCK_K,
    )  # fmt: skip
    if SPLITS == 1:
        store_gated(both, m, of_tile, row_of_weight, first_n, bias_ptr, None, out_ptr, M, N)
    else:
        inside = (m < M) & (of_tile < N)
        size = 2 * tl.cast(M, tl.int64) * N
        places = parts_ptr + 2 * m * N + row_of_weight
        if is_last_part(both, places + part * size, inside, counts_ptr + tile, SPLITS):
            both = sum_of_parts(places, size, inside, SPLITS)
            store_gated(both, m, of_tile, row_of_weight, first_n, bias_ptr, None, out_ptr, M, N)


@implements(
    ops.linear_swiglu,
    backend="triton_split_k",
    repeat=straight_line,
    backward=linear_swiglu_backward,
    when=lambda x: has_at_most(MOST_ROWS, x),
    configs=CONFIGS,
)
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    x, weight, bias = lowered(x, weight, bias)
    out = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch_split_k(linear_swiglu_split_k_kernel, as_matrix(x), weight.T, bias, out, config, halves=2)
    return out
