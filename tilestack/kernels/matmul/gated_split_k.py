"""The first half of a gated feed-forward layer for up to 64 rows, as in decoding: `gated.py` with the sum along K shared out.

A tile is the gate's beside that of up, so that whoever has all of its parts (`split_k.py`) has both halves of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.contract.workspace import workspace
from tilestack.kernels.early import early, fetch_rows, pieces_of, wait_for_last
from tilestack.kernels.matmul.gated import linear_swiglu_backward, store_gated
from tilestack.kernels.matmul.naive import sum_along_k
from tilestack.kernels.matmul.products import has_at_most
from tilestack.kernels.matmul.split_k import LEAST_ROWS, MOST_ROWS, Config, is_last_part, sum_of_parts
from tilestack.kernels.tiles import accumulator, as_matrix, cdiv, next_power, widened
from tilestack.ops.autocast import lowered

SHAPES = ((32, 128, 1), (64, 64, 1), (64, 64, 4), (32, 128, 2))
CONFIGS = {f"{n}x{k}x{splits}": Config(n, k, splits) for n, k, splits in SHAPES}


@triton.jit
def linear_swiglu_split_k_kernel(
    x_ptr, weight_ptr, bias_ptr, parts_ptr, counts_ptr, out_ptr,  # [M, K], [2N, K], [2N] or None, [SPLITS, M, 2N], [tiles], [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_n, weight_stride_k,
    EARLY: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    first = part.to(tl.int64) * share
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
        m < M, of_tile < N, tl.minimum(K - part * share, share), x_stride_k, weight_stride_k, EVEN_K, ACC, BLOCK_K,
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
    rows, bias = as_matrix(x), None if bias is None else bias.contiguous()
    (M, K), N = rows.shape, weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    tiles, split = cdiv(2 * N, config.n), config.splits > 1
    parts = torch.empty((config.splits, M, 2 * N), dtype=widened(x.dtype), device=x.device) if split else None
    counts = workspace("split_k_counts", (tiles,), torch.int32, x.device) if split else None
    pieces, size = pieces_of(weight, config.n // 2, config.part_of(K), config.warps)
    launch(
        linear_swiglu_split_k_kernel, (tiles, config.splits), rows, weight, bias, parts, counts, out,
        M, N, K, *rows.stride(), *weight.stride(),
        PIECES=pieces, BYTES=size, SPLITS=config.splits, EVEN_K=K % config.k == 0, ACC=accumulator(x.dtype),
        BLOCK_M=max(next_power(M), LEAST_ROWS), BLOCK_N=config.n // 2, BLOCK_K=config.k,
        num_warps=config.warps, num_stages=max(config.stages * 2 // x.element_size(), 1), **early(x),
    )  # fmt: skip
    return out
