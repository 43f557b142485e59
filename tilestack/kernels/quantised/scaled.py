"""A product of 8-bit codes in tiles, with their scales at its end.

    c[m, n] = a_scale[m] · b_scale[n] · Σ_k a[m, k] · b[k, n] + bias[n]

The loop is that of the pipelined product (`matmul/pipelined.py`), with half the bytes of a half precision and twice the
arithmetic in an instruction. Integer codes are added up in int32, exactly. With zero points, Σ (a - az) (b - bz) is

    Σ a b  -  az[m] · Σ_k b[k, n]  -  bz[n] · (Σ_k a[m, k] - K az[m])

so that the codes are multiplied as they are, and the sums of rows and columns, made beforehand, put it right at the end.
Each term may pass what int32 holds; they wrap around, and what is left after the subtractions has wrapped back.
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
from tilestack.kernels.matmul.naive import tile_of_product
from tilestack.kernels.matmul.ordered import tile_in_bands
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.tiles import as_matrix, cdiv, next_power
from tilestack.ops.quantised_linear import result_dtype
from tilestack.tuning.model import Gpu, product_us

BAND = 8
CODES_OF_ROWS = 4096  # that a program adds up at a time


class Config(NamedTuple):
    """A tile of C, the step along K, how many steps are in flight, and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    def model_us(self, M: int, N: int, K: int, gpu: Gpu) -> float:
        faster = gpu._replace(flops_per_us=2 * gpu.flops_per_us)
        return product_us(M, N, K, self.m, self.n, faster, itemsize=1)


CONFIGS = {
    "128x128": Config(128, 128, 128, 3, 8),
    "64x128": Config(64, 128, 128, 3, 4),
    "64x64": Config(64, 64, 128, 4, 4),
    "16x64": Config(16, 64, 256, 4, 4),
}


@triton.jit
def scaled_product_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, bias_ptr,  # [M, K], [K, N], [M], [N], [N] or None
    a_zero_ptr, b_zero_ptr, a_sums_ptr, b_sums_ptr, c_ptr,  # [M], [N], [M], [N], each or None; [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    EVEN_K: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    total, m, n = tile_of_product(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
        EVEN_K, tl.int32, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if a_zero_ptr is not None:
        a_zero = tl.load(a_zero_ptr + m, mask=m < M, other=0).to(tl.int32)
        total -= a_zero * tl.load(b_sums_ptr + n, mask=n < N, other=0)
    if b_zero_ptr is not None:
        a_sums = tl.load(a_sums_ptr + m, mask=m < M, other=0)
        if a_zero_ptr is not None:
            a_sums -= a_zero * K
        total -= tl.load(b_zero_ptr + n, mask=n < N, other=0).to(tl.int32) * a_sums
    store_scaled(total, m, n, a_scale_ptr, b_scale_ptr, bias_ptr, c_ptr, M, N)


@triton.jit
def store_scaled(total, m, n, a_scale_ptr, b_scale_ptr, bias_ptr, c_ptr, M, N):
    """Turn sums of codes into numbers, round once, and store what lies inside of C, which is contiguous."""
    a_scale = tl.load(a_scale_ptr + m, mask=m < M, other=0).to(tl.float32)
    b_scale = tl.load(b_scale_ptr + n, mask=n < N, other=0).to(tl.float32)
    out = total.to(tl.float32) * (a_scale * b_scale)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
    tl.store(c_ptr + m * N + n, out.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def sums_of_rows_kernel(codes_ptr, sums_ptr, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, columns, BLOCK):
        place = codes_ptr + row * row_stride + (first + column).to(tl.int64) * column_stride
        total += tl.load(place, mask=first + column < columns, other=0)
    tl.store(sums_ptr + row, tl.sum(total, 0))


def tile_for(a: Tensor, b: Tensor, config: Config) -> Config:
    """A smaller tile where Triton cannot see vectors, and each element takes an address of its own."""
    sizes = [a.shape[1], b.shape[1], *(max(matrix.stride()) for matrix in (a, b))]
    if not any(size % 16 for size in sizes) and 1 in a.stride() and 1 in b.stride():
        return config
    return Config(min(config.m, 64), min(config.n, 64), 32, config.stages, 4)


def sums_of_rows(codes: Tensor) -> Tensor:
    """The sum of each row of an int8 matrix, in int32."""
    rows, columns = codes.shape
    sums = torch.empty(rows, dtype=torch.int32, device=codes.device)
    block = min(CODES_OF_ROWS, next_power(max(columns, 16)))
    launch(sums_of_rows_kernel, (rows,), codes, sums, columns, *codes.stride(), BLOCK=block, num_warps=4)
    return sums


def sums_that_zeros_need(
    x: Tensor, weight: Tensor, x_zero: Tensor | None, weight_zero: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The sums of x's rows, which the weight's zero points need, and of the weight's, which those of x need."""
    return sums_of_rows(x) if weight_zero is not None else None, sums_of_rows(weight) if x_zero is not None else None


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


@implements(
    ops.linear_int8, backend="triton", repeat=straight_line, dtypes=HALVES_AND_SINGLE, configs=CONFIGS, invariant=True
)
def linear_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, x_zero: Tensor | None,
    weight_zero: Tensor | None, dtype: str, config: Config,
) -> Tensor:  # fmt: skip
    rows = as_matrix(x)
    (M, K), N = rows.shape, weight.shape[0]
    c = torch.empty((M, N), dtype=result_dtype(weight_scale, dtype), device=x.device)
    sums = sums_that_zeros_need(rows, weight, x_zero, weight_zero)
    config = tile_for(rows, weight.T, config)
    launch(
        scaled_product_kernel, (cdiv(M, config.m) * cdiv(N, config.n),), rows, weight.T,
        *contiguous(x_scale, weight_scale, bias, x_zero, weight_zero), *sums, c, M, N, K, *rows.stride(), *weight.T.stride(),
        EVEN_K=K % config.k == 0, BAND=BAND, BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=config.k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return c.view(*x.shape[:-1], N)
