"""The three products of a layer in fp8, forward and backward; what they are and why is in `fp8.py`."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.train.fp8_weights import WeightCodes, codes_of_weight


def in_fp8(rows: Tensor, weight: Tensor, offsets: Tensor | None = None, weights: WeightCodes | None = None) -> Tensor:
    """rows @ weight.T in bfloat16; with offsets, each row with the weight of its group, as `grouped_linear` has it."""
    rows = rows.to(torch.bfloat16)
    if not len(rows):
        return rows.new_empty(0, weight.shape[-2])
    return Product.apply(rows, weight, offsets, *codes_of_weight(weight, weights))


def product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, offsets: Tensor | None) -> Tensor:
    """left [M, K] times the transpose of right [N, K], or of that of its group, codes and their scales each."""
    if offsets is None:
        return ops.linear_fp8(left, right, left_scale, right_scale, dtype="bfloat16")
    return ops.grouped_linear_fp8(left, right, left_scale, right_scale, offsets, dtype="bfloat16")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, weight8, weight_scale, *weight_turned):  # type: ignore[override]
        x8, x_scale, *x_turned = ops.fp8_tiles(x, "rows", "blocks")
        learns = ctx.needs_input_grad[1]  # what is frozen, beside an adapter, needs no x
        ctx.save_for_backward(offsets, *weight_turned, *(x_turned if learns else ()))
        ctx.dtype = weight.dtype
        return product(x8, x_scale, weight8, weight_scale, offsets)

    @staticmethod
    @once_differentiable  # its gradient is made of codes, which have none of their own
    def backward(ctx, grad):  # type: ignore[override]
        offsets, weight_turned, weight_scale, *x_turned = ctx.saved_tensors
        grad8, grad_scale, *grad_turned = ops.fp8_tiles(grad, "rows", "rows")
        dx = product(grad8, grad_scale, weight_turned, weight_scale, offsets) if ctx.needs_input_grad[0] else None
        dweight = gradient_of_weight(grad_turned, x_turned, offsets).to(ctx.dtype) if x_turned else None
        return dx, dweight, *(None for _ in range(5))


def gradient_of_weight(grad: list[Tensor], x: list[Tensor], offsets: Tensor | None) -> Tensor:
    """dyᵀ x from the codes and scales of both, turned: [N, K], or that of each group."""
    (grad8, grad_scale), (x8, x_scale) = grad, x
    if offsets is None:
        return product(grad8, grad_scale, x8, x_scale, None)
    return ops.grouped_outer_fp8(grad8, x8, grad_scale, x_scale, offsets, dtype="bfloat16")
