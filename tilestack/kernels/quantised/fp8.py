"""A product of fp8 codes, whose sums leave the tensor cores after every 128 of K.

    total += a_scale[m, block] · b_scale[n, block] · Σ_{k in block} a[m, k] · b[k, n]

Hopper's tensor cores add fp8 products up to about 14 bits, and what is added to a large sum loses most of its own. So a sum
is taken out after 128 products and added to one in float32, which is also where scales of blocks have their place. With one
scale for a row or a tensor they wait for the end (`scaled.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.ordered import tile_in_bands
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, reads_fp8
from tilestack.kernels.quantised.scaled import BAND, Config, contiguous, tile_for
from tilestack.kernels.tiles import as_matrix, cdiv
from tilestack.ops.quantised_linear import BLOCK, E4M3, by_blocks, result_dtype

CONFIGS = {
    "128x128": Config(128, 128, 128, 3, 8),
    "64x128": Config(64, 128, 128, 4, 4),
    "64x64": Config(64, 64, 128, 4, 4),
    "16x64": Config(16, 64, 128, 4, 4),
}
OPERANDS = dict(x=(E4M3,), weight=(E4M3,), x_scale=HALVES_AND_SINGLE, weight_scale=HALVES_AND_SINGLE)


@triton.jit
def add_up_blocks(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr,  # of the first step: [BLOCK_M, BLOCK_K], [BLOCK_K, BLOCK_N], [BLOCK_M, 1], one
    a_inside, b_inside, K, a_stride_k, b_stride_k,
    BY_BLOCKS: tl.constexpr, OF_A_BLOCK: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile's sums over K, with their scales where blocks have them."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptr, mask=a_inside, other=0.0)
            b = tl.load(b_ptr, mask=b_inside, other=0.0)
        else:
            left = K - start
            a = tl.load(a_ptr, mask=a_inside & (k[None, :] < left), other=0.0)
            b = tl.load(b_ptr, mask=(k[:, None] < left) & b_inside, other=0.0)
        part = tl.dot(a, b)
        if BY_BLOCKS:
            block = start // OF_A_BLOCK
            a_scale = tl.load(a_scale_ptr + block, mask=a_inside, other=0).to(tl.float32)
            part *= a_scale * tl.load(b_scale_ptr + block).to(tl.float32)
        total += part
        a_ptr += tl.cast(a_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    return total


@triton.jit
def fp8_product_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, c_ptr,  # [M, K], [K, N], scales, [N] or None, [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, a_scale_stride, b_scale_stride,
    BY_BLOCKS: tl.constexpr, OF_A_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += m * a_stride_m + k[None, :] * a_stride_k
    b_ptr += k[:, None] * b_stride_k + n * b_stride_n
    total = add_up_blocks(
        a_ptr, b_ptr, a_scale_ptr + m * a_scale_stride, b_scale_ptr + tile_n * BLOCK_N // OF_A_BLOCK * b_scale_stride,
        m < M, n < N, K, a_stride_k, b_stride_k, BY_BLOCKS, OF_A_BLOCK, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if not BY_BLOCKS:
        a_scale = tl.load(a_scale_ptr + m * a_scale_stride, mask=m < M, other=0).to(tl.float32)
        total *= a_scale * tl.load(b_scale_ptr + n * b_scale_stride, mask=n < N, other=0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
    tl.store(c_ptr + m * N + n, total.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


def rounds_to_halves(x: Tensor, weight_scale: Tensor, dtype: str) -> bool | str:
    """What a product of fp8 by tensor cores is asked for: the instructions, and no more digits than they have."""
    if x.device.type != "cpu" and result_dtype(weight_scale, dtype) == torch.float32:
        return "tensor cores add up fp8 to about 14 bits, too few for a result in float32; ask for dtype='bfloat16'"
    return reads_fp8(x)


def scale_strides(x_scale: Tensor, weight_scale: Tensor) -> tuple[int, int]:
    """From one row's scale to the next, in contiguous memory: none where all share it, the blocks of a row, or one."""
    if by_blocks(weight_scale):
        return x_scale.shape[-1], weight_scale.shape[1]
    return min(x_scale.ndim, 1), weight_scale.ndim


@implements(
    ops.linear_fp8, backend="triton", repeat=straight_line, dtypes=OPERANDS, configs=CONFIGS, when=rounds_to_halves
)
def linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str, config: Config
) -> Tensor:
    rows = as_matrix(x)
    (M, K), N = rows.shape, weight.shape[0]
    c = torch.empty((M, N), dtype=result_dtype(weight_scale, dtype), device=x.device)
    config = tile_for(rows, weight.T, config)
    launch(
        fp8_product_kernel, (cdiv(M, config.m) * cdiv(N, config.n),), rows, weight.T,
        *contiguous(x_scale, weight_scale, bias), c,
        M, N, K, *rows.stride(), *weight.T.stride(), *scale_strides(x_scale, weight_scale),
        BY_BLOCKS=by_blocks(weight_scale), OF_A_BLOCK=BLOCK, EVEN_K=K % config.k == 0, BAND=BAND,
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=config.k, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return c.view(*x.shape[:-1], N)
