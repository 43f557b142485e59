"""The readable matmul: a 2-D grid of output tiles, each the sum of products of thin tiles along K.

               K                   N
          +---------+        +---+---+---+
        M | A tile →|      K | B |   |   |     program (m, n) owns one BLOCK_M x BLOCK_N tile of C
          +---------+        | ↓ |   |   |     and walks BLOCK_K steps along K, adding A tile @ B tile
          |         |        +---+---+---+

Operands come with any strides, so one kernel serves the forward (x @ weightᵀ) and both gradients (grad @ weight,
gradᵀ @ x). It is the version to learn from: cuBLAS is faster, and `auto` prefers it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import accumulator, as_matrix, cdiv
from tilestack.ops.autocast import lowered


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr,  # [M, K], [K, N], [N], [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += m * a_stride_m + k[None, :] * a_stride_k
    b_ptr += k[:, None] * b_stride_k + n * b_stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptr, mask=(m < M) & (k[None, :] < left), other=0)
        b = tl.load(b_ptr, mask=(k[:, None] < left) & (n < N), other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        a_ptr += tl.cast(a_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0).to(ACC)
    tl.store(c_ptr + m * c_stride_m + n, total.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias for matrices of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    block = (128, 128, 64, 8) if a.element_size() == 2 else (64, 64, 16, 4)
    if block[0] > M or block[1] > N:
        block = (32, 32, min(32, block[2]), 4)
    launch(
        matmul_kernel, (cdiv(M, block[0]), cdiv(N, block[1])), a, b, bias, c, M, N, K, *a.stride(), *b.stride(), c.stride(0),
        HAS_BIAS=bias is not None, ACC=accumulator(a.dtype), BLOCK_M=block[0], BLOCK_N=block[1], BLOCK_K=block[2], num_warps=block[3], num_stages=3,
    )  # fmt: skip
    return c


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    grad, rows = as_matrix(grad), as_matrix(x).to(grad.dtype)
    dx = matmul(grad, weight.to(grad.dtype)).view(x.shape).to(x.dtype) if needs[0] else None
    dweight = matmul(grad.T, rows).to(weight.dtype) if needs[1] else None
    dbias = grad.sum(0, dtype=bias.dtype) if needs[2] and bias is not None else None
    return dx, dweight, dbias


@implements(ops.linear, backend="triton", repeat=straight_line, backward=linear_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight, bias = lowered(x, weight, bias)
    return matmul(as_matrix(x), weight.T, bias).view(*x.shape[:-1], weight.shape[0])
