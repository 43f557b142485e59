"""A linear layer of up to 64 rows, as in decoding: the sum along K is shared out, so that all multiprocessors read weights.

One row of tiles of C is all there is, N / BLOCK_N programs: for N = 4096 and tiles of 128, 32 of them on a GPU with 132
multiprocessors. So SPLITS programs share a tile, each with a part of K:

            K: part 0 | part 1 | part 2 | part 3
    tile n    program    program  program  program      each writes its partial sum in float32 and counts itself;
                  ↓         ↓        ↓        ↓         whoever counts last adds up all parts, in order, and stores
               part[0]   part[1]  part[2]  part[3]

The order of the addition does not depend on who came last: the same bits in every run. The counters are a workspace, zero
between calls: the last of a tile sets its own back. The weights are asked for while the kernel in front still computes x
(kernels/early.py).
"""

from typing import Any, NamedTuple

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
from tilestack.kernels.matmul.naive import store_with_bias, sum_along_k
from tilestack.kernels.matmul.pipelined import linear_backward
from tilestack.kernels.matmul.products import has_at_most, linear_by
from tilestack.kernels.tiles import accumulator, cdiv, next_power, widened
from tilestack.tuning.model import Gpu, product_us

MOST_ROWS = 64  # of x, a tile's height
LEAST_ROWS = 16  # of a tile that tensor cores multiply


class Config(NamedTuple):
    """Columns of a tile, the step along K, the programs that share a tile, and steps in flight of two bytes an element."""

    n: int
    k: int
    splits: int
    stages: int = 4
    warps: int = 4

    def part_of(self, K: int) -> int:
        """What each program has of a sum along K; 0 where not all have the same."""
        return 0 if K % (self.k * self.splits) else K // self.splits

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        return product_us(M, N, K, max(next_power(M), LEAST_ROWS), self.n, gpu, self.splits)


SHAPES = ((64, 64, 4), (64, 64, 1), (64, 64, 2), (64, 64, 8), (32, 128, 1), (32, 128, 4), (128, 64, 4), (128, 64, 8))
CONFIGS = {f"{n}x{k}x{splits}": Config(n, k, splits) for n, k, splits in SHAPES}


@triton.jit
def part_of_k(K, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which part of a sum along K is this program's, where it begins and how long it is."""
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    return part, part.to(tl.int64) * share, tl.minimum(K - part * share, share)


@triton.jit
def is_last_part(total, places, inside, count_ptr, SPLITS: tl.constexpr):
    """Leave a partial sum, count it, and answer whether all others of its tile are there; the last sets the count back."""
    tl.store(places, total, mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them counts
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    is_last = before == SPLITS - 1
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


@triton.jit
def sum_of_parts(places, size, inside, SPLITS: tl.constexpr):
    """The partial sums of a tile added up, always in the same order; `size` lies between one part and the next."""
    total = tl.zeros(places.shape, places.dtype.element_ty)
    for part in range(SPLITS):
        total += tl.load(places + part * size, mask=inside, other=0, cache_modifier=".cg")
    return total


@triton.jit
def matmul_split_k_kernel(
    a_ptr, b_ptr, bias_ptr, parts_ptr, counts_ptr, c_ptr,  # [M, K], [K, N], [N] or None, [SPLITS, M, N], [tiles], [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    EARLY: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part, first, length = part_of_k(K, SPLITS, BLOCK_K)
    fetch_rows(b_ptr + first * b_stride_k, tile * BLOCK_N, N, b_stride_n, BLOCK_N, PIECES, BYTES)
    wait_for_last(EARLY)
    m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = sum_along_k(
        a_ptr + first * a_stride_k + m * a_stride_m, b_ptr + first * b_stride_k + n * b_stride_n, m < M, n < N,
        length, a_stride_k, b_stride_k, EVEN_K, ACC, BLOCK_K,
    )  # fmt: skip
    if SPLITS == 1:
        store_with_bias(total, m, n, bias_ptr, c_ptr, M, N)
    else:
        inside = (m < M) & (n < N)
        size = tl.cast(M, tl.int64) * N
        if is_last_part(total, parts_ptr + part * size + m * N + n, inside, counts_ptr + tile, SPLITS):
            total = sum_of_parts(parts_ptr + m * N + n, size, inside, SPLITS)
            store_with_bias(total, m, n, bias_ptr, c_ptr, M, N)


def launch_split_k(
    kernel: Any, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, config: Config, halves: int = 1
) -> None:
    """Launch a kernel like the one above on a [M, K] and b [K, halves · N], with memory for its partial sums and counts. A
    tile has its columns in equal numbers from each of the halves of b."""
    (M, K), columns = a.shape, b.shape[1]
    tiles, block = cdiv(columns, config.n), config.n // halves
    pieces, size = pieces_of(b.T, block, config.part_of(K), config.warps)
    parts = counts = None
    if config.splits > 1:
        parts = torch.empty((config.splits, M, columns), dtype=widened(a.dtype), device=a.device)
        counts = workspace("split_k_counts", (tiles,), torch.int32, a.device)
    launch(
        kernel, (tiles, config.splits), a, b, None if bias is None else bias.contiguous(), parts, counts, c,
        M, columns // halves, K, *a.stride(), *b.stride(),
        PIECES=pieces, BYTES=size, SPLITS=config.splits, EVEN_K=K % config.k == 0, ACC=accumulator(a.dtype),
        BLOCK_M=max(next_power(M), LEAST_ROWS), BLOCK_N=block, BLOCK_K=config.k,
        num_warps=config.warps, num_stages=max(config.stages * 2 // a.element_size(), 1), **early(a),
    )  # fmt: skip


def split_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """a @ b + bias for up to 64 rows of a, matrices of any strides."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    launch_split_k(matmul_split_k_kernel, a, b, bias, c, config)
    return c


@implements(
    ops.linear,
    backend="triton_split_k",
    repeat=straight_line,
    backward=linear_backward,
    when=lambda x: has_at_most(MOST_ROWS, x),
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(lambda a, b, c: split_product(a, b, c, config), x, weight, bias)
