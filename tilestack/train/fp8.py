"""Matrix products of hidden layers in 8-bit floating point, e4m3, with a scale for each 128 numbers or 128 by 128.

All three products of a layer are made so, forward and backward:

    y = x wᵀ        dx = dy w        dw = dyᵀ x

Each adds up over another dimension, along which both its operands must lie, so x, w and dy are needed both ways. One pass
(`ops.fp8_tiles`) reads each of them once and writes its codes as it lies and turned, with scales that it finds in tiles of
128 by 128: there is no largest number of the whole tensor to wait for, and a scale that few share lets gradients do with
e4m3 too. What the backward needs of x and w is kept as codes, half of what bfloat16 takes.

Weights, gradients and the optimizer stay in their own precision; embeddings and the head are left alone.
"""

import functools

import torch
from torch import Tensor, nn

from tilestack import ops
from tilestack.nn.lora import LoRALinear
from tilestack.train.execution import layers_of

MULTIPLE = 16  # what the tensor cores want rows and columns to be a multiple of


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the linear layers inside a model's layers compute in fp8, where their sizes allow it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        found = f"compute capability {torch.cuda.get_device_capability(device)}" if device.type == "cuda" else "a CPU"
        raise ValueError(
            f"precision.fp8 needs a GPU of compute capability 8.9 or newer (L4, H100, H200), and this is {found}; "
            "set precision.fp8 = false"
        )
    for module in layers_of(model).modules():
        if isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            # Beside an adapter, the frozen product alone is made in fp8: adapters are thin, and learn in float32.
            setattr(module, "base" if isinstance(module, LoRALinear) else "forward", functools.partial(linear, module))


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    y = Product.apply(rows, module.weight) if len(rows) else rows.new_empty(0, module.out_features)
    y = y if module.bias is None else y + module.bias.to(y.dtype)
    return y.view(*x.shape[:-1], -1)


def product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    """left [M, K] times the transpose of right [N, K], codes and their scales each."""
    return ops.linear_fp8(left, right, left_scale, right_scale, dtype="bfloat16")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        x8, x_scale, *x_turned = ops.fp8_tiles(x, "rows", "blocks")
        weight8, weight_scale, *weight_turned = ops.fp8_tiles(weight, "blocks", "blocks")
        learns = ctx.needs_input_grad[1]  # what is frozen, beside an adapter, needs no x
        ctx.save_for_backward(*weight_turned, *(x_turned if learns else ()))
        ctx.dtype = weight.dtype
        return product(x8, x_scale, weight8, weight_scale)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        weight_turned, weight_scale, *x_turned = ctx.saved_tensors
        grad8, grad_scale, *grad_turned = ops.fp8_tiles(grad, "rows", "rows")
        dx = product(grad8, grad_scale, weight_turned, weight_scale) if ctx.needs_input_grad[0] else None
        return dx, product(*grad_turned, *x_turned).to(ctx.dtype) if x_turned else None
