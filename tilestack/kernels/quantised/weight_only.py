"""A linear layer that streams a weight of 8 or 4 bits, and makes numbers of its codes on the way to the tensor cores.

    out[m, n] = Σ_group scale[n, group] · Σ_{k in group} x[m, k] · (code[n, k] - zero[n, group]) + bias[n]

Of few rows the time is that of reading the weight, so bytes are what is saved: a quarter of a half precision's in 4 bits.
A code less its zero point is a small integer, which half precision holds exactly, so a step along K multiplies exact numbers;
it never reaches over the end of a group, and what it adds up is scaled in float32. Nothing is rounded but sums.

    bytes of a row   |b0 … b15|b16 … b31|   4-bit codes: the low halves of 16 bytes are 16 neighbours, the high halves
    low halves   k =  0 … 15   32 … 47      the next 16. So a step is two products, of x's columns under the low halves
    high halves  k = 16 … 31   48 … 63      and of those under the high ones, and no code changes places.

One row of tiles is all that few rows have, so K is shared out as in `matmul/split_k.py`.
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
from tilestack.contract.workspace import workspace
from tilestack.kernels.matmul.naive import store_with_bias
from tilestack.kernels.matmul.ordered import tile_in_bands
from tilestack.kernels.matmul.split_k import is_last_part, sum_of_parts
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, reads_fp8
from tilestack.kernels.tiles import as_matrix, cdiv
from tilestack.ops import weight_only
from tilestack.tuning.model import Gpu, product_us

BAND = 8
LEAST_INNER = 16  # of a step that tensor cores multiply
CENTRE = tl.constexpr(weight_only.CENTRE)
NIBBLES = tl.constexpr(weight_only.PACKED // 2)  # neighbours in the low halves of neighbouring bytes


class Config(NamedTuple):
    """A tile of the result, the longest step along K, the programs that share a tile, and steps in flight."""

    m: int
    n: int
    k: int
    splits: int
    stages: int = 4
    warps: int = 4

    def model_us(self, M: int, N: int, bytes_of_a_row: int, gpu: Gpu) -> float:
        return product_us(M, N, bytes_of_a_row, self.m, self.n, gpu, self.splits, itemsize=1)


CONFIGS = {
    "16x64x4": Config(16, 64, 128, 4),
    "16x64x1": Config(16, 64, 128, 1),
    "16x32x8": Config(16, 32, 128, 8),
    "16x128x8": Config(16, 128, 128, 8),
    "64x64": Config(64, 64, 128, 1, 3),
    "128x128": Config(128, 128, 64, 1, 3, 8),
}


@triton.jit
def weight_only_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr,  # [M, K], [N, K] or [N, K / 2], [N, groups] twice, [N]
    parts_ptr, counts_ptr, out_ptr,  # [SPLITS, M, N], [tiles], [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_n, weight_stride_k, group, groups,
    PACKED: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    part = tl.program_id(1)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, K), BLOCK_K):
        place = n * groups + first // group
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + place, mask=n < N, other=0).to(tl.int16)
        elif PACKED:
            zero = tl.full([1, BLOCK_N], CENTRE, tl.int16)
        if PACKED:
            byte = tl.arange(0, BLOCK_K // 2)
            k = first + byte // NIBBLES * (2 * NIBBLES) + byte % NIBBLES
            codes = load_codes(weight_ptr, first // 2 + byte, n, weight_stride_k, weight_stride_n, N, K // 2, EVEN_K)
            x = load_columns(x_ptr, m, k, x_stride_m, x_stride_k, M, K, EVEN_K)
            sums = tl.dot(x, number_of_nibble(codes & 15, zero, x.dtype), input_precision="ieee")
            x = load_columns(x_ptr, m, k + NIBBLES, x_stride_m, x_stride_k, M, K, EVEN_K)
            sums = tl.dot(x, number_of_nibble(codes >> 4, zero, x.dtype), sums, input_precision="ieee")
        else:
            k = first + tl.arange(0, BLOCK_K)
            codes = load_codes(weight_ptr, k, n, weight_stride_k, weight_stride_n, N, K, EVEN_K)
            x = load_columns(x_ptr, m, k, x_stride_m, x_stride_k, M, K, EVEN_K)
            if zero_ptr is not None:
                codes = codes.to(tl.int16) - zero
            sums = tl.dot(x, codes.to(x.dtype), input_precision="ieee")
        total += sums * tl.load(scale_ptr + place, mask=n < N, other=0).to(tl.float32)
    if SPLITS == 1:
        store_with_bias(total, m, n, bias_ptr, out_ptr, M, N)
    else:
        inside = (m < M) & (n < N)
        size = tl.cast(M, tl.int64) * N
        places = parts_ptr + m * N + n
        if is_last_part(total, places + part * size, inside, counts_ptr + tl.program_id(0), SPLITS):
            store_with_bias(sum_of_parts(places, size, inside, SPLITS), m, n, bias_ptr, out_ptr, M, N)


@triton.jit
def number_of_nibble(code, zero, DTYPE: tl.constexpr):
    """code - zero, exactly. GPUs convert integers slowly, so in half precisions the code becomes the last bits of a number
    whose steps there are ones, 128 of bfloat16 and 1024 of float16, and this number is taken off with the zero point."""
    if tl.bfloat16 == DTYPE:
        number = (code.to(tl.int16) | 0x4300).to(DTYPE, bitcast=True) - (zero + 128).to(DTYPE)
    elif tl.float16 == DTYPE:
        number = (code.to(tl.int16) | 0x6400).to(DTYPE, bitcast=True) - (zero + 1024).to(DTYPE)
    else:
        number = (code.to(tl.int16) - zero).to(DTYPE)
    return number


@triton.jit
def load_columns(x_ptr, m, k, x_stride_m, x_stride_k, M, K, EVEN_K: tl.constexpr):
    """Some columns of some rows of x."""
    inside = m < M
    if not EVEN_K:
        inside = inside & (k < K)[None, :]
    return tl.load(x_ptr + m * x_stride_m + k.to(tl.int64)[None, :] * x_stride_k, mask=inside, other=0)


@triton.jit
def load_codes(weight_ptr, k, n, stride_k, stride_n, N, K, EVEN_K: tl.constexpr):
    """Some of each weight's codes, or bytes of two of them, as columns."""
    inside = n < N
    if not EVEN_K:
        inside = inside & (k < K)[:, None]
    place = weight_ptr + n * stride_n + k.to(tl.int64)[:, None] * stride_k
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


def step_of(config: Config, inner: int, groups: int) -> int:
    """The step along K: where there are several groups, the longest that reaches over the end of none."""
    group = inner // groups
    return config.k if groups == 1 else min(config.k, group & -group)


def groups_are_steps(x: Tensor, weight: Tensor, scale: Tensor) -> bool | str:
    groups = scale.shape[1]
    if groups > 1 and x.shape[-1] // groups % LEAST_INNER:
        return f"it takes groups of a multiple of {LEAST_INNER} codes, not {x.shape[-1] // groups}"
    return reads_fp8(x) if weight.is_floating_point() else True


@implements(
    ops.linear_weight_only,
    backend="triton",
    repeat=straight_line,
    dtypes=dict(x=HALVES_AND_SINGLE, scale=HALVES_AND_SINGLE, bias=HALVES_AND_SINGLE),
    configs=CONFIGS,
    when=groups_are_steps,
)
def linear_weight_only(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, config: Config
) -> Tensor:
    rows = as_matrix(x)
    (M, K), N, groups = rows.shape, *scale.shape
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if x.dtype == torch.float32:
        config = config._replace(m=16, n=32, k=32)  # without tensor cores, what is multiplied lies in registers
    step = step_of(config, K, groups)
    tiles, split = cdiv(M, config.m) * cdiv(N, config.n), config.splits > 1
    parts = torch.empty((config.splits, M, N), dtype=torch.float32, device=x.device) if split else None
    counts = workspace("weight_only_counts", (tiles,), torch.int32, x.device) if split else None
    zero, bias = (None if tensor is None else tensor.contiguous() for tensor in (zero, bias))
    launch(
        weight_only_kernel, (tiles, config.splits), rows, weight, scale.contiguous(), zero, bias, parts, counts, out,
        M, N, K, *rows.stride(), *weight.stride(), max(K // groups, 1), groups,
        PACKED=weight.dtype == torch.uint8, SPLITS=config.splits, EVEN_K=K % step == 0, BAND=BAND,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=step, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out.view(*x.shape[:-1], N)
