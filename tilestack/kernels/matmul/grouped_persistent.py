"""The grouped product with as many programs as multiprocessors, fed by TMA: `persistent.py` over groups of rows.

    numbers of tiles        group 0 (5 rows)    0  1  2        BLOCK_M = 4, three columns of tiles
                                                3  4  5
                            group 1 (4 rows)    6  7  8        tile 7: the tiles of group 0 end at 6, so it is tile 1
                            group 2 (0 rows)                   of group 1: rows 5 … 8, second column
                            group 3 (1 row)     9 10 11

A program walks over every 132nd number and finds each one's group by counting tiles, from the ends that only the GPU knows;
within a group tiles come in bands (`ordered.py`). TMA reads whole tiles, so the last one of a group holds rows of the next
group too: they make rows of C that are not stored. Weights are a stack of matrices to TMA, which reads zeros past the edges
of each.

The gradient of a weight adds up over rows, where those of the next group must not be read: full steps come by TMA, and the
rows that are left by masked loads.

Rows past the last group are zeroed by a launch of their own, hardly longer than a launch takes where there are none.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.grouped import gradients_by, spans_of_groups, zero_rows_past
from tilestack.kernels.matmul.ordered import tile_in_bands
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.matmul.tma import can_move, in_rows, movable
from tilestack.kernels.tiles import cdiv, multiprocessors, next_power
from tilestack.ops.autocast import lowered
from tilestack.tuning.model import Gpu, product_us


class Config(NamedTuple):
    """A tile of C, the step along K, how many steps are in flight, and how many tiles high a band is."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    band: int = 8

    def model_us(self, rows: int, groups: int, N: int, K: int, gpu: Gpu) -> float:
        # As if all groups were one, each of them ending with half a tile that is empty.
        return product_us(rows + groups * self.m // 2, N, K, self.m, self.n, gpu)


CONFIGS = {
    "128x256": Config(128, 256, 64, 3, 8),
    "128x128": Config(128, 128, 64, 4, 8),
    "64x256": Config(64, 256, 64, 4, 4),
    "64x128": Config(64, 128, 64, 4, 4),
    "128x256 band 16": Config(128, 256, 64, 3, 8, band=16),
}


@triton.jit
def grouped_persistent_fwd_kernel(
    a_desc, b_desc, ends_ptr, c_ptr,  # tiles of [M, K] and of [groups, K, N], [groups], [M, N]
    M, N, K, groups,
    B_TURNED: tl.constexpr, GROUPS: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, GROUPS)
    starts, ends = spans_of_groups(ends_ptr, M, groups, GROUPS)
    ends = tl.where(g < groups, ends, starts)  # rows past the last group have no tiles
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M * tl.cdiv(N, BLOCK_N)
    tiles_so_far = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=True):
        done = tiles_so_far <= tile  # the groups that end before this tile
        group = tl.sum(done.to(tl.int32), 0)
        start = tl.sum(tl.where(g == group, starts, 0), 0)
        end = tl.sum(tl.where(g == group, ends, 0), 0)
        of_group = tile - tl.sum(tl.where(done, tiles, 0), 0)
        tile_m, tile_n = tile_in_bands(of_group, end - start, N, BAND, BLOCK_M, BLOCK_N)
        first_m = start + tile_m * BLOCK_M
        first_n = tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([first_m, k])
            if B_TURNED:
                b = b_desc.load([group, first_n, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([group, k, first_n]).reshape(BLOCK_K, BLOCK_N)
            total = tl.dot(a, b, total)
        m = first_m + tl.arange(0, BLOCK_M)[:, None]
        n = first_n + tl.arange(0, BLOCK_N)[None, :]
        place = c_ptr + m.to(tl.int64) * N + n
        tl.store(place, total.to(c_ptr.dtype.element_ty), mask=(m < end) & (n < N))


@triton.jit
def grouped_persistent_bwd_kernel(
    grad_desc, x_desc, grad_ptr, x_ptr, ends_ptr, dweight_ptr,  # [M, N] and [M, K], twice; [groups]; [groups, N, K]
    M, N, K, groups, grad_stride, x_stride,
    BAND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    of_a_group = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), of_a_group * groups, tl.num_programs(0)):
        group = tile // of_a_group
        tile_n, tile_k = tile_in_bands(tile % of_a_group, N, K, BAND, BLOCK_N, BLOCK_K)
        first_n = tile_n * BLOCK_N
        first_k = tile_k * BLOCK_K
        n = first_n + tl.arange(0, BLOCK_N)
        k = first_k + tl.arange(0, BLOCK_K)
        end = tl.minimum(tl.load(ends_ptr + group), M)
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        last = start + (end - start) // BLOCK_M * BLOCK_M
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for m in range(start, last, BLOCK_M):
            total = tl.dot(grad_desc.load([m, first_n]).T, x_desc.load([m, first_k]), total)
        if last < end:
            row = last.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
            grad = tl.load(grad_ptr + row * grad_stride + n[None, :], mask=(row < end) & (n < N)[None, :], other=0)
            x = tl.load(x_ptr + row * x_stride + k[None, :], mask=(row < end) & (k < K)[None, :], other=0)
            total = tl.dot(grad.T, x, total)
        place = dweight_ptr + group.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(place, total.to(dweight_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def with_columns_for(columns: int, config: Config) -> Config:
    """Rows that hold no vectors take an address for each element of a tile: fewer of them fit into registers."""
    return config._replace(n=64) if columns % 16 else config


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor, config: Config) -> Tensor:
    """a[rows of group g] @ b[g] for operands of any strides; zero in rows of no group."""
    (M, K), (groups, _, N) = a.shape, b.shape
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if 0 in (M, N, K):
        return c.zero_()
    offsets = offsets.contiguous()
    config = with_columns_for(N, config)
    a, (b, b_turned) = in_rows(a), movable(b)
    most_tiles = cdiv(M + groups * (config.m - 1), config.m) * cdiv(N, config.n)
    launch(
        grouped_persistent_fwd_kernel, (min(multiprocessors(c.device), most_tiles),),
        Tile.of(a, (config.m, config.k)), Tile.of(b, (1, config.n, config.k) if b_turned else (1, config.k, config.n)),
        offsets, c, M, N, K, groups,
        B_TURNED=b_turned, GROUPS=next_power(groups + 1), BAND=config.band,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=config.k, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return zero_rows_past(c, offsets)


def gradient_of_weight(grad: Tensor, x: Tensor, offsets: Tensor, config: Config) -> Tensor:
    """grad[rows of group g].T @ x[rows of group g], zero for a group without rows."""
    (M, N), K, groups = grad.shape, x.shape[1], offsets.shape[0]
    dweight = torch.empty((groups, N, K), dtype=x.dtype, device=x.device)
    if 0 in (M, N, K):
        return dweight.zero_()
    config = with_columns_for(K, config)
    grad, x = in_rows(grad), in_rows(x)
    tiles = groups * cdiv(N, config.m) * cdiv(K, config.n)
    launch(
        grouped_persistent_bwd_kernel, (min(multiprocessors(x.device), tiles),),
        Tile.of(grad, (config.k, config.m)), Tile.of(x, (config.k, config.n)), grad, x, offsets.contiguous(), dweight,
        M, N, K, groups, grad.stride(0), x.stride(0),
        BAND=config.band, BLOCK_N=config.m, BLOCK_K=config.n, BLOCK_M=config.k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dweight


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, needs: tuple[bool, bool, bool], config: Config
) -> tuple[Tensor | None, Tensor | None, None]:
    product = functools.partial(grouped_product, config=config)
    weight_product = functools.partial(gradient_of_weight, config=config)
    return gradients_by(product, weight_product, grad, x, weight, offsets, needs)


@implements(
    ops.grouped_linear,
    backend="triton_persistent",
    repeat=straight_line,
    backward=grouped_linear_backward,
    when=can_move,
    dtypes=HALVES,
    configs=CONFIGS,
)
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, config: Config) -> Tensor:
    x, weight = lowered(x, weight)
    return grouped_product(x, weight.mT, offsets, config)
