"""Fourth rung: as many programs as multiprocessors, each walking over its share of the tiles, fed by the copy engine (TMA).

                     time →
    program 0    | tile 0: load ⋯ multiply | tile 132 | tile 264 |
    program 1    | tile 1                  | tile 133 | tile 265 |      loads of the next tile start while the
    …                                                                   last one is rounded and stored
    program 131  | tile 131                | tile 263 | tile 395 |

The rungs below start a program for each tile: it begins with empty shared memory and ends with idle tensor cores. Here the
two loops, over tiles and along K, are one to the pipeline, and only a program's first tile waits for its first loads.

A descriptor tells TMA the address, shape and strides of a matrix. One thread then asks for a tile by its two coordinates,
where before every thread computed 64-bit addresses and masks for its own elements; the registers go to larger tiles.
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
from tilestack.kernels.matmul.epilogue import PLAIN, Epilogue, finish_tile
from tilestack.kernels.matmul.ordered import tile_in_bands
from tilestack.kernels.matmul.products import HALVES, linear_by, linear_gradients_by
from tilestack.kernels.matmul.tma import can_move, movable
from tilestack.kernels.tiles import cdiv, multiprocessors
from tilestack.tuning.model import Gpu, product_us


class Config(NamedTuple):
    """A tile of C, the step along K, and how many steps are in flight."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    band: int = 8

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        return product_us(M, N, K, self.m, self.n, gpu)


CONFIGS = {
    "128x256": Config(128, 256, 64, 3, 8),
    "128x128": Config(128, 128, 64, 4, 8),
    "128x128x128": Config(128, 128, 128, 3, 8),
    "64x256": Config(64, 256, 64, 4, 4),
    "64x128": Config(64, 128, 64, 4, 4),
    "128x256 band 16": Config(128, 256, 64, 3, 8, band=16),
}


@triton.jit
def matmul_persistent_kernel(
    a_desc, b_desc, bias_ptr, residual_ptr, seed_ptr, pre_ptr, c_ptr,  # [M, K], [K, N], [N], [M, N], [], [M, N], [M, N]
    M, N, K, residual_stride_m, residual_stride_n, below,
    ACTIVATION: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_in_bands(tile, M, N, BAND, BLOCK_M, BLOCK_N)
        first_m = tile_m * BLOCK_M
        first_n = tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([k, first_m]).T if A_TURNED else a_desc.load([first_m, k])
            b = b_desc.load([first_n, k]).T if B_TURNED else b_desc.load([k, first_n])
            total = tl.dot(a, b, total)
        finish_tile(
            total, tl.cast(first_m, tl.int64), tl.cast(first_n, tl.int64), M, N,
            bias_ptr, residual_ptr, residual_stride_m, residual_stride_n, seed_ptr, below, pre_ptr, c_ptr, ACTIVATION,
        )  # fmt: skip


def persistent_product(a: Tensor, b: Tensor, bias: Tensor | None, config: Config, epilogue: Epilogue = PLAIN) -> Tensor:
    """a @ b + bias, then the epilogue, for matrices of any strides; those that TMA cannot move are copied."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if 0 in (M, N, K):
        return c.zero_()  # TMA moves no empty matrix; only a gradient, which has no bias, adds up over nothing
    bias = None if bias is None else bias.contiguous()
    (a, a_turned), (b, b_turned) = movable(a), movable(b)
    # Rows of C that hold no vectors take an address for each element of a tile: half as many fit into registers.
    config = config._replace(n=min(config.n, 128)) if N % 16 else config
    a_tile = Tile.of(a, (config.k, config.m) if a_turned else (config.m, config.k))
    b_tile = Tile.of(b, (config.n, config.k) if b_turned else (config.k, config.n))
    programs = min(multiprocessors(c.device), cdiv(M, config.m) * cdiv(N, config.n))
    residual, seed, pre, strides, below = epilogue.arguments()
    launch(
        matmul_persistent_kernel, (programs,), a_tile, b_tile, bias, residual, seed, pre, c, M, N, K, *strides, below,
        ACTIVATION=epilogue.activation, A_TURNED=a_turned, B_TURNED=b_turned, BAND=config.band,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=config.k, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return c


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], config: Config
) -> tuple[Tensor | None, ...]:
    return linear_gradients_by(functools.partial(persistent_product, config=config), grad, x, weight, bias, needs)


@implements(
    ops.linear,
    backend="triton_persistent",
    repeat=straight_line,
    backward=linear_backward,
    when=can_move,
    dtypes=HALVES,
    configs=CONFIGS,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_by(functools.partial(persistent_product, config=config), x, weight, bias)
