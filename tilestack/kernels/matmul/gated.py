"""The first half of a gated feed-forward layer in one kernel: two projections and silu(gate) · up in the epilogue.

    weight    +------+                A program owns a tile of the result, which is a tile of the gate and the same tile
     [2N, K]  | gate |                of up. Their columns side by side are one tile of a product, whose tile of x is
              +------+                loaded once for both:
              |  up  |
              +------+                    [gate | up] += x tile @ [gate's weightᵀ tile | up's weightᵀ tile]
                                          out = silu(gate + bias) · (up + bias)

The pair, 2 · M · N numbers, is never written, where a projection and `swiglu` write it and read it again. Where a gradient
is wanted it is: the backward is `swiglu`'s on the pair, then the two products of a linear layer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate
from tilestack.kernels.elementwise.gated import one_tensor_backward
from tilestack.kernels.matmul.epilogue import halves_of_columns
from tilestack.kernels.matmul.naive import block_of_product, sum_along_k
from tilestack.kernels.matmul.ordered import BAND, tile_in_bands
from tilestack.kernels.matmul.pipelined import pipelined_product
from tilestack.kernels.matmul.products import Product, linear_again, linear_gradients_by
from tilestack.kernels.tiles import accumulator, as_matrix, cdiv
from tilestack.ops.autocast import lowered


@triton.jit
def linear_swiglu_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, pair_ptr, out_ptr,  # [M, K], [2N, K], [2N] or None, [M, 2N] or None, [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_n, weight_stride_k,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_bands(tl.program_id(0), M, N, BAND, BLOCK_M, BLOCK_N)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    first_n = tile_n.to(tl.int64) * BLOCK_N
    column = tl.arange(0, 2 * BLOCK_N)[None, :]  # of the gate, then of up
    of_tile = first_n + column % BLOCK_N
    row_of_weight = of_tile + tl.where(column < BLOCK_N, 0, N)
    both = sum_along_k(
        x_ptr + m * x_stride_m, weight_ptr + row_of_weight * weight_stride_n, m < M, of_tile < N,
        K, x_stride_k, weight_stride_k, EVEN_K, ACC, BLOCK_K,
    )  # fmt: skip
    store_gated(both, m, of_tile, row_of_weight, first_n, bias_ptr, pair_ptr, out_ptr, M, N)


@triton.jit
def store_gated(both, m, of_tile, row_of_weight, first_n, bias_ptr, pair_ptr, out_ptr, M, N):
    """Store silu(gate) · up of a tile of the gate beside that of up, whose first columns are first_n, and the pair where
    there is memory for it."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        both += tl.load(bias_ptr + row_of_weight, mask=of_tile < N, other=0).to(both.dtype)
    if pair_ptr is not None:
        tl.store(pair_ptr + 2 * m * N + row_of_weight, both.to(DTYPE), mask=(m < M) & (of_tile < N))
    # Rounded as it is stored, so that the gradient is that of what was computed.
    gate, up = halves_of_columns(both.to(DTYPE).to(both.dtype))
    n = first_n + tl.arange(0, gate.shape[1])[None, :]
    out = activate(gate, "silu", DTYPE.primitive_bitwidth == 16) * up
    tl.store(out_ptr + m * N + n, out.to(DTYPE), mask=(m < M) & (n < N))


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, keep_pair: bool) -> tuple[Tensor, Tensor | None]:
    """The result, and the pair [M, 2N] if that is to be kept."""
    x, weight, bias = lowered(x, weight, bias)
    rows, bias = as_matrix(x), None if bias is None else bias.contiguous()
    (M, K), N = rows.shape, weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    pair = torch.empty((M, 2 * N), dtype=x.dtype, device=x.device) if keep_pair else None
    block = block_of_product(rows, weight.T)
    block["BLOCK_N"] //= 2  # the tile of a product is that of the gate beside that of up
    launch(
        linear_swiglu_fwd_kernel, (cdiv(M, block["BLOCK_M"]) * cdiv(N, block["BLOCK_N"]),), rows, weight, bias, pair, out,
        M, N, K, *rows.stride(), *weight.stride(),
        EVEN_K=K % block["BLOCK_K"] == 0, ACC=accumulator(x.dtype), BAND=BAND, **block, num_stages=3,
    )  # fmt: skip
    return out, pair


def linear_swiglu_and_pair(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return gated_product(x, weight, bias, keep_pair=True)


def gated_gradients_by(
    product: Product, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool],
    pair: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """From the pair, computed again where it was not kept."""
    if pair is None:
        pair = linear_again(product, grad.dtype, x, weight, bias)
    dpair = one_tensor_backward(as_matrix(grad), pair, "silu", False)
    return linear_gradients_by(product, dpair, x, weight, bias, needs)


def linear_swiglu_backward_from_pair(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], pair: Tensor
) -> tuple[Tensor | None, ...]:
    return gated_gradients_by(pipelined_product, grad, x, weight, bias, needs, pair)


def linear_swiglu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    return gated_gradients_by(pipelined_product, grad, x, weight, bias, needs, None)


def empty_pair(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(), weight.shape[0]), dtype=lowered(x)[0].dtype)


@implements(
    ops.linear_swiglu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=linear_swiglu_backward,
    extras=Extras(linear_swiglu_and_pair, linear_swiglu_backward_from_pair, when=lambda x: True, fake=empty_pair),
)
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return gated_product(x, weight, bias, keep_pair=False)[0]
