"""Third rung: the ordered product with its loads under way while the tensor cores work, and an end that can do more.

With num_stages = 3, Triton keeps the tiles of the next two steps along K coming into shared memory, by copies that no
thread waits for, while the tiles of this step are multiplied:

    step        0        1        2        3
    load     A₂ B₂    A₃ B₃    A₄ B₄    A₅ B₅
    multiply A₀·B₀    A₁·B₁    A₂·B₂    A₃·B₃

A step whose loads need no mask costs the fewest instructions around its product, so K that is a multiple of BLOCK_K is a
constant the kernel is compiled for.

The total is still in registers when the last step is done: what a layer does to every element of it costs arithmetic, but
no reading and writing (`epilogue.py`). One tile for all sizes, so that a row of C has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.epilogue import PLAIN, Epilogue, finish_tile
from tilestack.kernels.matmul.naive import block_of_product, tile_of_product
from tilestack.kernels.matmul.ordered import BAND, tile_in_bands
from tilestack.kernels.matmul.products import linear_by, linear_gradients_by
from tilestack.kernels.tiles import accumulator, cdiv


@triton.jit
def matmul_pipelined_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, seed_ptr, pre_ptr, c_ptr,  # [M, K], [K, N], [N], [M, N], [], [M, N], [M, N]
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, residual_stride_m, residual_stride_n, below,
    ACTIVATION: tl.constexpr, HAS_K: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if HAS_K and seed_ptr is not None:
        tl.assume(
            K > 0
        )  # or Triton 3.6 makes Hopper's products wait for each other, with the loop of dropout after theirs
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    total, _, _ = tile_of_product(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
        EVEN_K, ACC, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    finish_tile(
        total, tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N, M, N,
        bias_ptr, residual_ptr, residual_stride_m, residual_stride_n, seed_ptr, below, pre_ptr, c_ptr, ACTIVATION,
    )  # fmt: skip


def pipelined_product(a: Tensor, b: Tensor, bias: Tensor | None, epilogue: Epilogue = PLAIN) -> Tensor:
    """a @ b + bias, then the epilogue, for matrices of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    block = block_of_product(a, b)
    grid = (cdiv(M, block["BLOCK_M"]) * cdiv(N, block["BLOCK_N"]),)
    residual, seed, pre, strides, below = epilogue.arguments()
    launch(
        matmul_pipelined_kernel, grid, a, b, bias, residual, seed, pre, c,
        M, N, K, *a.stride(), *b.stride(), *strides, below,
        ACTIVATION=epilogue.activation, HAS_K=K > 0, EVEN_K=K % block["BLOCK_K"] == 0,
        ACC=accumulator(a.dtype), BAND=BAND, **block, num_stages=3,
    )  # fmt: skip
    return c


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    return linear_gradients_by(pipelined_product, grad, x, weight, bias, needs)


@implements(ops.linear, backend="triton", invariant=True, repeat=straight_line, backward=linear_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by(pipelined_product, x, weight, bias)
