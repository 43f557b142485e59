"""First rung of the ladder of products: a 2-D grid of output tiles, each the sum of products of thin tiles along K.

    c[m, n] = Σ_k a[m, k] · b[k, n] + bias[n]

               K                   N
          +---------+        +---+---+---+
        M | A tile →|      K | B |   |   |     program (m, n) owns one BLOCK_M x BLOCK_N tile of C
          +---------+        | ↓ |   |   |     and walks BLOCK_K steps along K, adding A tile @ B tile
          |         |        +---+---+---+

Over a loop on single numbers it gains reuse: a number of A is loaded once for BLOCK_N products, one of B for BLOCK_M. The
tensor cores wait for every load, for a step is loaded when the one before is done, and the grid starts its programs row by
row of C, whose tiles share little of what lies in the L2 cache. The next rungs cure both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.products import linear_by, linear_gradients_by
from tilestack.kernels.tiles import accumulator, cdiv


@triton.jit
def tile_of_product(
    a_ptr, b_ptr, tile_m, tile_n, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of a @ b, its rows and its columns; places outside of a and b count as zeros."""
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = sum_along_k(
        a_ptr + m * a_stride_m, b_ptr + n * b_stride_n, m < M, n < N, K, a_stride_k, b_stride_k, EVEN_K, ACC, BLOCK_K
    )
    return total, m, n


@triton.jit
def add_product(total, a, b):
    """total + a @ b. Without tensor cores every product is added on its own, and a long sum of one sign loses digits: the
    products of a step are added up by themselves first."""
    if a.dtype == tl.float32:
        # Any number but 0 keeps Triton from making one sum of the two.
        step = tl.dot(a, b, input_precision="ieee", out_dtype=total.dtype, max_num_imprecise_acc=1)
        return total + step
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def sum_along_k(
    a_ptr, b_ptr, has_m, has_n, K, a_stride_k, b_stride_k,  # where rows of a and columns of b begin, and which there are
    EVEN_K: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of a times columns of b, BLOCK_K steps at a time; without masks along K where it is a multiple of them."""
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += k[None, :] * a_stride_k
    b_ptr += k[:, None] * b_stride_k
    total = tl.zeros([a_ptr.shape[0], b_ptr.shape[1]], ACC)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptr, mask=has_m, other=0)
            b = tl.load(b_ptr, mask=has_n, other=0)
        else:
            left = K - start
            a = tl.load(a_ptr, mask=has_m & (k[None, :] < left), other=0)
            b = tl.load(b_ptr, mask=(k[:, None] < left) & has_n, other=0)
        total = add_product(total, a, b)
        a_ptr += tl.cast(a_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(b_stride_k, tl.int64) * BLOCK_K
    return total


@triton.jit
def store_with_bias(total, m, n, bias_ptr, c_ptr, M, N):
    """Add the bias, round once, and store what lies inside of C, which is contiguous."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0).to(total.dtype)
    tl.store(c_ptr + m * N + n, total.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def matmul_naive_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr,  # [M, K], [K, N], [N] or None, [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    total, m, n = tile_of_product(
        a_ptr, b_ptr, tl.program_id(0), tl.program_id(1), M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
        False, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_with_bias(total, m, n, bias_ptr, c_ptr, M, N)


def block_of_product(a: Tensor, b: Tensor) -> dict[str, int]:
    """The tile of the first three rungs, the same for any number of rows of a; without tensor cores a smaller one."""
    # Where Triton cannot see vectors, each element takes an address of its own: half as many fit into registers.
    sizes = [a.shape[1], b.shape[1], *(max(matrix.stride()) for matrix in (a, b))]
    in_vectors = not any(size % 16 for size in sizes) and 1 in a.stride() and 1 in b.stride()
    if a.element_size() > 2:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32 if in_vectors else 16, num_warps=4)
    if not in_vectors:
        return dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, num_warps=8)
    return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8)


def naive_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias for matrices of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    block = block_of_product(a, b)
    grid = cdiv(M, block["BLOCK_M"]), cdiv(N, block["BLOCK_N"])
    launch(
        matmul_naive_kernel, grid, a, b, bias, c, M, N, K, *a.stride(), *b.stride(),
        ACC=accumulator(a.dtype), **block, num_stages=1,
    )  # fmt: skip
    return c


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    return linear_gradients_by(naive_product, grad, x, weight, bias, needs)


@implements(ops.linear, backend="triton_naive", repeat=straight_line, backward=linear_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by(naive_product, x, weight, bias)
