"""A gated feed-forward layer in fp8 as one function, in which neither the gated pair nor its gradient is ever written in
bfloat16: both leave the kernel that makes them as the codes that the products after them take.

    x ─codes─▶ · gate_up ─▶ [gate | up] ─codes of silu(gate) · up─▶ · down ─▶ y
    dy ─codes─▶ · down ─▶ dh ─codes of [dgate | dup]─▶ · gate_up ─▶ dx       dw of each from the codes, turned

For the backward it keeps [gate | up] in bfloat16, from which the slope of the gate is had without the error of codes, and
the codes of x and of the pair, turned: what two products with `ops.swiglu` between them keep too.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.nn import MLP, Linear, MoE
from tilestack.train.fp8_product import gradient_of_weight, product
from tilestack.train.fp8_weights import WeightCodes, codes_of_weight


def is_plain(module: MLP) -> bool:
    """Whether a layer is two products around silu(gate) · up and no more: no biases, no adapter, nobody listening."""
    parts = module.gate_up, module.down
    hooks = (
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in parts
    )
    return (
        module.activation == "silu"
        and all(type(part) is Linear and part.bias is None for part in parts)
        and not any(hooks)
    )


def mlp(module: MLP, weights: WeightCodes, x: Tensor) -> Tensor:
    if not is_plain(module):
        return MLP.forward(module, x)
    return gated_in_fp8(x.reshape(-1, x.shape[-1]), module.gate_up.weight, module.down.weight, None, weights).view(
        x.shape
    )


def experts(module: MoE, weights: WeightCodes, rows: Tensor, offsets: Tensor) -> Tensor:
    if module.gate_up_lora is not None or module.down_lora is not None:
        return MoE.experts(module, rows, offsets)
    return gated_in_fp8(rows, module.gate_up, module.down, offsets, weights)


def gated_in_fp8(
    rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor | None = None, weights: WeightCodes | None = None
) -> Tensor:
    """swiglu(rows @ gate_up.T) @ down.T in bfloat16; with offsets, each row with the weights of its group."""
    rows = rows.to(torch.bfloat16)
    if not len(rows):
        return rows.new_empty(0, down.shape[-2])
    codes = *codes_of_weight(gate_up, weights), *codes_of_weight(down, weights)
    return GatedProducts.apply(rows, gate_up, down, offsets, *codes)


class GatedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, offsets, *codes):  # type: ignore[override]
        gate_up8, gate_up_scale, *gate_up_turned = codes[:4]
        down8, down_scale, *down_turned = codes[4:]
        x8, x_scale, *x_turned = ops.fp8_tiles(x, "rows", "blocks")
        pair = product(x8, x_scale, gate_up8, gate_up_scale, offsets)
        h8, h_scale, *h_turned = ops.swiglu_fp8_tiles(pair, "rows", "blocks")
        _, ctx.gate_up_learns, ctx.down_learns, *_ = ctx.needs_input_grad
        of_weights = (*(x_turned if ctx.gate_up_learns else ()), *(h_turned if ctx.down_learns else ()))
        ctx.save_for_backward(offsets, pair, *gate_up_turned, *down_turned, *of_weights)
        ctx.dtypes = gate_up.dtype, down.dtype
        return product(h8, h_scale, down8, down_scale, offsets)

    @staticmethod
    @once_differentiable  # its gradient is made of codes, which have none of their own
    def backward(ctx, grad):  # type: ignore[override]
        offsets, pair, gate_up_turned, gate_up_scale, down_turned, down_scale, *of_weights = ctx.saved_tensors
        x_turned, h_turned = of_weights[:2], of_weights[2 if ctx.gate_up_learns else 0 :]
        dx = dgate_up = ddown = None
        grad8, grad_scale, *grad_turned = ops.fp8_tiles(grad, "rows", "rows")
        if ctx.down_learns:
            ddown = gradient_of_weight(grad_turned, h_turned, offsets).to(ctx.dtypes[1])
        if ctx.needs_input_grad[0] or ctx.gate_up_learns:
            dh = product(grad8, grad_scale, down_turned, down_scale, offsets)
            pair8, pair_scale, *pair_turned = ops.swiglu_gradient_fp8_tiles(dh, pair, "rows", "rows")
            if ctx.needs_input_grad[0]:
                dx = product(pair8, pair_scale, gate_up_turned, gate_up_scale, offsets)
            if ctx.gate_up_learns:
                dgate_up = gradient_of_weight(pair_turned, x_turned, offsets).to(ctx.dtypes[0])
        return dx, dgate_up, ddown, *(None for _ in range(9))
