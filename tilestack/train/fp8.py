"""Matrix products of hidden layers in 8-bit floating point: activations and weights in e4m3, gradients in e5m2.

Each tensor is scaled so that its largest element is the largest its format can hold, anew at every product. Products are
summed in float32 by `torch._scaled_mm`. All three products of a layer are made so, forward and backward:

    y = x wᵀ        dx = dy w        dw = dyᵀ x

Weights, gradients and the optimizer stay in their own precision; embeddings and the head are left alone.
"""

import functools

import torch
from torch import Tensor, nn

from tilestack.nn.lora import LoRALinear
from tilestack.train.execution import layers_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
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
    padding = -len(rows) % MULTIPLE
    y = Product.apply(nn.functional.pad(rows, (0, 0, 0, padding)), module.weight)[: len(rows)]
    y = y if module.bias is None else y + module.bias.to(y.dtype)
    return y.view(*x.shape[:-1], -1)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the factor that undoes its scaling."""
    limit = torch.finfo(dtype).max
    factor = x.abs().amax().float().clamp(min=1e-12) / limit
    return (x.float() / factor).clamp(-limit, limit).to(dtype), factor


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a [M, K] times the transpose of b [N, K], both with their rows contiguous."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16)


def turned(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].t().contiguous(), x[1]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        x8, weight8 = scaled(x, E4M3), scaled(weight, E4M3)
        ctx.save_for_backward(*x8, *weight8)
        ctx.dtype = weight.dtype
        return product(x8, weight8)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        grad8 = scaled(grad, E5M2)
        dx = product(grad8, turned((weight, weight_factor)))
        if not ctx.needs_input_grad[1]:  # frozen, beside an adapter
            return dx, None
        dw = product(turned(grad8), turned((x, x_factor)))
        return dx, dw.to(ctx.dtype)
