"""Grouped products of fp8 codes: the sums of `fp8.py` over groups of rows whose sizes only the GPU knows.

Forward, tiles are laid over groups as in `matmul/grouped.py`, and each tile's sums leave the tensor cores after every 128
of K. For the gradient of a weight, codes lie along the rows and 128 of them, counted from the first row, share a scale.
Groups begin anywhere, so the steps of a group are these blocks. Those that are its own come as they are, in a pipeline; of
the first and the last it takes its part, with zeros for the rest:

    rows              0        128        256        384        512
    scales            |    0    |    1     |    2     |    3     |
    group 1 of 3           ├────────────────────┤                        all of step 1, parts of 0 and 2
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.grouped import most_tiles, span_of_tile
from tilestack.kernels.quantised import scaled
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.quantised.fp8 import OPERANDS, add_up_blocks, rounds_to_halves
from tilestack.kernels.quantised.scaled import contiguous, tile_for
from tilestack.kernels.tiles import cdiv, next_power
from tilestack.ops.quantised_linear import BLOCK, E4M3, result_dtype
from tilestack.tuning.model import Gpu


class Config(scaled.Config):
    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:  # type: ignore[override]
        # As if all groups were one, each of them ending with half a tile that is empty.
        return super().model_us(rows + groups * self.m // 2, N, K, gpu)


class OuterConfig(scaled.Config):
    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:  # type: ignore[override]
        return super().model_us(N * groups, K, cdiv(rows, max(groups, 1)), gpu)


CONFIGS = {
    "128x128": Config(128, 128, 128, 3, 8),
    "64x128": Config(64, 128, 128, 4, 4),
    "64x64": Config(64, 64, 128, 4, 4),
}
OUTER_CONFIGS = {name: OuterConfig(*CONFIGS[name]) for name in ("128x128", "64x64")}  # others spill
OUTER_OPERANDS = dict(left=(E4M3,), right=(E4M3,), left_scale=HALVES_AND_SINGLE, right_scale=HALVES_AND_SINGLE)


@triton.jit
def grouped_fp8_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, c_ptr,  # [M, K], [groups, K, N], scales, [groups], [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_g, b_stride_k, b_stride_n, a_scale_stride, b_scale_lines, b_scale_stride, groups,
    BY_BLOCKS: tl.constexpr, OF_A_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, first_row, end = span_of_tile(tl.program_id(0), ends_ptr, M, groups, GROUPS, BLOCK_M)
    if group > groups:
        return
    K = tl.where(group < groups, K, 0)  # rows past the last group are multiplied with nothing
    m = first_row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += m * a_stride_m + k[None, :] * a_stride_k
    b_ptr += group.to(tl.int64) * b_stride_g + k[:, None] * b_stride_k + n * b_stride_n
    a_scale_ptr += m * a_scale_stride
    b_scale_ptr += group.to(tl.int64) * b_scale_lines * b_scale_stride
    total = add_up_blocks(
        a_ptr, b_ptr, a_scale_ptr, b_scale_ptr + tl.program_id(1) * BLOCK_N // OF_A_BLOCK * b_scale_stride,
        m < end, n < N, K, a_stride_k, b_stride_k, BY_BLOCKS, OF_A_BLOCK, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if not BY_BLOCKS:
        there = (n < N) & (group < groups)
        a_scale = tl.load(a_scale_ptr, mask=(m < end) & (group < groups), other=0).to(tl.float32)
        total *= a_scale * tl.load(b_scale_ptr + n, mask=there, other=0).to(tl.float32)
    tl.store(c_ptr + m * N + n, total.to(c_ptr.dtype.element_ty), mask=(m < end) & (n < N))


@triton.jit
def block_scale(left_ptr, right_ptr, block, inside):
    """What the sums of a block of rows are scaled by: a number for each line of left, times one of right."""
    return tl.load(left_ptr + block, mask=inside, other=0).to(tl.float32) * tl.load(right_ptr + block).to(tl.float32)


@triton.jit
def grouped_outer_fp8_kernel(
    left_ptr, right_ptr, left_scale_ptr, right_scale_ptr, ends_ptr, out_ptr,  # [N, M], [K, M], scales, [groups], [groups, N, K]
    M, N, K, left_stride_n, left_stride_m, right_stride_k, right_stride_m, blocks,
    OF_A_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    end = tl.minimum(tl.load(ends_ptr + group), M)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    left_scale_ptr += n * blocks
    right_scale_ptr += tl.program_id(1) * BLOCK_K // OF_A_BLOCK * blocks
    left_ptr += n * left_stride_n
    right_ptr += k * right_stride_k
    whole = tl.cdiv(start, BLOCK_M) * BLOCK_M  # the first block that is all the group's
    last = end // BLOCK_M * BLOCK_M  # and where they end
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(whole, last, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M).to(tl.int64)
        left = tl.load(left_ptr + m[None, :] * left_stride_m, mask=n < N, other=0.0)
        right = tl.load(right_ptr + m[:, None] * right_stride_m, mask=k < K, other=0.0)
        total += tl.dot(left, right) * block_scale(left_scale_ptr, right_scale_ptr, first // OF_A_BLOCK, n < N)
    for edge in range(2):
        first = tl.where(edge == 0, whole - BLOCK_M, last)
        # Only where it has a row: the scale of a block amid which an empty group lies need not be finite.
        if (start < end) & (((edge == 0) & (start < whole)) | ((edge == 1) & (whole <= last) & (last < end))):
            m = first + tl.arange(0, BLOCK_M).to(tl.int64)
            mine = (m >= start) & (m < end)
            left = tl.load(left_ptr + m[None, :] * left_stride_m, mask=mine[None, :] & (n < N), other=0.0)
            right = tl.load(right_ptr + m[:, None] * right_stride_m, mask=mine[:, None] & (k < K), other=0.0)
            total += tl.dot(left, right) * block_scale(left_scale_ptr, right_scale_ptr, first // OF_A_BLOCK, n < N)
    place = out_ptr + group * N * K + n * K + k
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(n < N) & (k < K))


@implements(
    ops.grouped_linear_fp8,
    backend="triton",
    repeat=straight_line,
    dtypes=OPERANDS,
    configs=CONFIGS,
    when=rounds_to_halves,
)
def grouped_linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str, config: Config
) -> Tensor:
    (M, K), (groups, N, _) = x.shape, weight.shape
    c = torch.empty((M, N), dtype=result_dtype(weight_scale, dtype), device=x.device)
    if groups == 0:
        return c.zero_()
    by_blocks = weight_scale.ndim == 3
    tile = tile_for(x, weight[0].T, config)
    scales = (x_scale.shape[1], *weight_scale.shape[1:]) if by_blocks else (1, N, 1)
    launch(
        grouped_fp8_kernel, (most_tiles(M, groups, tile.m), cdiv(N, tile.n)), x, weight.mT,
        *contiguous(x_scale, weight_scale, offsets), c, M, N, K, *x.stride(), *weight.mT.stride(), *scales, groups,
        BY_BLOCKS=by_blocks, OF_A_BLOCK=BLOCK, EVEN_K=K % tile.k == 0, GROUPS=next_power(groups + 1),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c


def outer_rounds_to_halves(left: Tensor, right_scale: Tensor, dtype: str) -> bool | str:
    return rounds_to_halves(left, right_scale, dtype)


@implements(
    ops.grouped_outer_fp8,
    backend="triton",
    repeat=straight_line,
    dtypes=OUTER_OPERANDS,
    configs=OUTER_CONFIGS,
    when=outer_rounds_to_halves,
)
def grouped_outer_fp8(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str,
    config: OuterConfig,
) -> Tensor:  # fmt: skip
    (N, M), K, groups = left.shape, right.shape[0], len(offsets)
    out = torch.empty((groups, N, K), dtype=result_dtype(right_scale, dtype), device=left.device)
    tile = tile_for(left, right.T, config)
    launch(
        grouped_outer_fp8_kernel, (cdiv(N, tile.m), cdiv(K, tile.n), groups), left, right,
        *contiguous(left_scale, right_scale, offsets), out, M, N, K, *left.stride(), *right.stride(), left_scale.shape[1],
        OF_A_BLOCK=BLOCK, BLOCK_N=tile.m, BLOCK_K=tile.n, BLOCK_M=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
