"""Matrix products of hidden layers in 8-bit floating point, e4m3, with a scale for each 128 numbers or 128 by 128.

All three products of a layer are made so, forward and backward:

    y = x wᵀ        dx = dy w        dw = dyᵀ x

Each adds up over another dimension, along which both its operands must lie, so x, w and dy are needed both ways. One pass
(`ops.fp8_tiles`) reads each of them once and writes its codes as it lies and turned, with scales that it finds in tiles of
128 by 128: there is no largest number of the whole tensor to wait for, and a scale that few share lets gradients do with
e4m3 too. What the backward needs of x and w is kept as codes, half of what bfloat16 takes.

The experts of a mixture are the same three products, grouped: a row meets the weight of its expert, and dw is added up over
each expert's rows.

Weights, gradients and the optimizer stay in their own precision; embeddings are left alone, and the head is unless asked
for (`fp8_head.py`).
"""

import functools

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.nn import MoE
from tilestack.nn.lora import LoRALinear
from tilestack.train.execution import layers_of

MULTIPLE = 16  # what the tensor cores want rows and columns to be a multiple of


def use_fp8(model: nn.Module, device: torch.device, head: bool = False) -> None:
    """Let the layers of a model, and its head where that is wanted, compute in fp8, on a GPU that has it."""
    if found := lacks_fp8(device):
        raise ValueError(
            f"precision.fp8 needs a GPU of compute capability 8.9 or newer (L4, H100, H200), and this is {found}; "
            "set precision.fp8 = false"
        )
    compute_in_fp8(model, head)


def lacks_fp8(device: torch.device) -> str:
    """What a device is that has no fp8; empty where it has."""
    if device.type != "cuda":
        return "a CPU"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= (8, 9) else f"compute capability {capability}"


def compute_in_fp8(model: nn.Module, head: bool = False) -> None:
    """Put fp8 in the place of the products inside a model's layers, where their sizes allow it; on a CPU, by definitions."""
    for module in layers_of(model).modules():
        if isinstance(module, nn.Linear) and takes_fp8(module):
            # Beside an adapter, the frozen product alone is made in fp8: adapters are thin, and learn in float32.
            setattr(module, "base" if isinstance(module, LoRALinear) else "forward", functools.partial(linear, module))
        elif isinstance(module, MoE) and takes_fp8(module):
            module.base_product = in_fp8  # type: ignore[method-assign]
    if head:
        weight = model.head_weight
        assert isinstance(weight, Tensor)
        if not suits(weight):
            raise ValueError(
                f"precision.fp8_head takes a vocabulary and a hidden size that are multiples of {MULTIPLE}, "
                f"not {tuple(weight.shape)}; set precision.fp8_head = false"
            )
        from tilestack.train.fp8_head import head_loss

        model.head_loss = head_loss  # type: ignore[assignment]


def modules_in_fp8(model: nn.Module) -> list[str]:
    """The names of the modules whose products are made in fp8."""
    replaced = ("forward", "base", "base_product")
    return [name for name, module in model.named_modules() if any(product in vars(module) for product in replaced)]


def takes_fp8(module: nn.Module) -> bool:
    """Whether a module of a layer is one whose products can be made in fp8: its kind and its sizes."""
    if isinstance(module, MoE):
        return suits(module.gate_up) and suits(module.down)
    return isinstance(module, nn.Linear) and suits(module.weight)


def suits(weight: Tensor) -> bool:
    return not any(size % MULTIPLE for size in weight.shape[-2:])


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    y = in_fp8(x.reshape(-1, x.shape[-1]), module.weight)
    y = y if module.bias is None else y + module.bias.to(y.dtype)
    return y.view(*x.shape[:-1], module.out_features)


def in_fp8(rows: Tensor, weight: Tensor, offsets: Tensor | None = None) -> Tensor:
    """rows @ weight.T in bfloat16; with offsets, each row with the weight of its group, as `grouped_linear` has it."""
    rows = rows.to(torch.bfloat16)
    return Product.apply(rows, weight, offsets) if len(rows) else rows.new_empty(0, weight.shape[-2])


def product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, offsets: Tensor | None) -> Tensor:
    """left [M, K] times the transpose of right [N, K], or of that of its group, codes and their scales each."""
    if offsets is None:
        return ops.linear_fp8(left, right, left_scale, right_scale, dtype="bfloat16")
    return ops.grouped_linear_fp8(left, right, left_scale, right_scale, offsets, dtype="bfloat16")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:  # type: ignore[override]
        x8, x_scale, *x_turned = ops.fp8_tiles(x, "rows", "blocks")
        weight8, weight_scale, *weight_turned = ops.fp8_tiles(weight, "blocks", "blocks")
        learns = ctx.needs_input_grad[1]  # what is frozen, beside an adapter, needs no x
        ctx.save_for_backward(offsets, *weight_turned, *(x_turned if learns else ()))
        ctx.dtype = weight.dtype
        return product(x8, x_scale, weight8, weight_scale, offsets)

    @staticmethod
    @once_differentiable  # its gradient is made of codes, which have none of their own
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        offsets, weight_turned, weight_scale, *x_turned = ctx.saved_tensors
        grad8, grad_scale, *grad_turned = ops.fp8_tiles(grad, "rows", "rows")
        dx = product(grad8, grad_scale, weight_turned, weight_scale, offsets) if ctx.needs_input_grad[0] else None
        dweight = gradient_of_weight(grad_turned, x_turned, offsets).to(ctx.dtype) if x_turned else None
        return dx, dweight, None


def gradient_of_weight(grad: list[Tensor], x: list[Tensor], offsets: Tensor | None) -> Tensor:
    """dyᵀ x from the codes and scales of both, turned: [N, K], or that of each group."""
    (grad8, grad_scale), (x8, x_scale) = grad, x
    if offsets is None:
        return product(grad8, grad_scale, x8, x_scale, None)
    return ops.grouped_outer_fp8(grad8, x8, grad_scale, x_scale, offsets, dtype="bfloat16")
