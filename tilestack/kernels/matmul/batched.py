"""A stack of products in one launch: the pipelined product (`pipelined.py`) with the matrices one after another in its grid.

    programs   0 1 2 3 | 4 5 6 7 | 8 9 …       those of a matrix are next to each other, in bands (`ordered.py`),
    matrix        0    |    1    |  2          so that they find its A and B in the cache

Many small products fill a GPU together where each alone has fewer tiles than there are multiprocessors. A transpose is a
view here too, so the gradients, grad @ bᵀ and aᵀ @ grad, are the same kernel. One tile for all numbers of rows and of
matrices, so that a row has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.naive import store_with_bias, tile_of_product
from tilestack.kernels.matmul.ordered import BAND, tile_in_bands
from tilestack.kernels.tiles import accumulator, cdiv
from tilestack.ops.autocast import lowered


@triton.jit
def bmm_kernel(
    a_ptr, b_ptr, c_ptr,  # [B, M, K], [B, K, N], [B, M, N]
    M, N, K, a_stride_b, a_stride_m, a_stride_k, b_stride_b, b_stride_k, b_stride_n,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile_m, tile_n = tile_in_bands(tl.program_id(0) % tiles, M, N, BAND, BLOCK_M, BLOCK_N)
    total, m, n = tile_of_product(
        a_ptr + matrix * a_stride_b, b_ptr + matrix * b_stride_b, tile_m, tile_n, M, N, K,
        a_stride_m, a_stride_k, b_stride_k, b_stride_n, EVEN_K, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_with_bias(total, m, n, None, c_ptr + matrix * M * N, M, N)


def block_of_stacks(a: Tensor, b: Tensor) -> dict[str, int]:
    """The tile of every product; without tensor cores a smaller one."""
    if a.element_size() > 2:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=16, num_warps=4)
    # Where Triton cannot see vectors, each element takes an address of its own: half as many fit into registers.
    steps = [step for stack in (a, b) for step in stack.stride() if step != 1]
    if any(size % 16 for size in (a.shape[2], b.shape[2], *steps)) or any(1 not in x.stride()[1:] for x in (a, b)):
        return dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, num_warps=8)
    return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for stacks of matrices of any strides."""
    (B, M, K), N = a.shape, b.shape[2]
    c = torch.empty((B, M, N), dtype=a.dtype, device=a.device)
    block = block_of_stacks(a, b)
    launch(
        bmm_kernel, (B * cdiv(M, block["BLOCK_M"]) * cdiv(N, block["BLOCK_N"]),), a, b, c,
        M, N, K, *a.stride(), *b.stride(),
        EVEN_K=K % block["BLOCK_K"] == 0, ACC=accumulator(a.dtype), BAND=BAND, **block, num_stages=3,
    )  # fmt: skip
    return c


def bmm_backward(grad: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """What arrives has the dtype of the product, which autocast may have lowered; gradients have those of their tensors."""
    da = batched_product(grad, b.to(grad.dtype).mT).to(a.dtype) if needs[0] else None
    db = batched_product(a.to(grad.dtype).mT, grad).to(b.dtype) if needs[1] else None
    return da, db


@implements(ops.bmm, backend="triton", invariant=True, repeat=straight_line, backward=bmm_backward)
def bmm(a: Tensor, b: Tensor) -> Tensor:
    return batched_product(*lowered(a, b))
