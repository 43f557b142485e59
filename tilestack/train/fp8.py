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

from tilestack.nn import MLP, MoE
from tilestack.nn.lora import LoRALinear
from tilestack.train import fp8_gated
from tilestack.train.execution import layers_of
from tilestack.train.fp8_gated import is_plain
from tilestack.train.fp8_product import in_fp8
from tilestack.train.fp8_weights import WeightCodes

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
    weights = model.weight_codes = WeightCodes()  # type: ignore[assignment]
    for module in layers_of(model).modules():
        if isinstance(module, nn.Linear) and takes_fp8(module):
            # Beside an adapter, the frozen product alone is made in fp8: adapters are thin, and learn in float32.
            replaced = "base" if isinstance(module, LoRALinear) else "forward"
            setattr(module, replaced, functools.partial(linear, module, weights=weights))
        elif isinstance(module, MLP) and is_plain(module) and takes_fp8(module):
            module.forward = functools.partial(fp8_gated.mlp, module, weights)  # type: ignore[method-assign]
        elif isinstance(module, MoE) and takes_fp8(module):
            module.base_product = functools.partial(in_fp8, weights=weights)  # type: ignore[method-assign]
            module.experts = functools.partial(fp8_gated.experts, module, weights)  # type: ignore[method-assign]
    if head:
        weight = model.head_weight
        assert isinstance(weight, Tensor)
        if not suits(weight):
            raise ValueError(
                f"precision.fp8_head takes a vocabulary and a hidden size that are multiples of {MULTIPLE}, "
                f"not {tuple(weight.shape)}; set precision.fp8_head = false"
            )
        from tilestack.train.fp8_head import head_loss

        model.head_loss = functools.partial(head_loss, weights=weights)  # type: ignore[assignment]


def modules_in_fp8(model: nn.Module) -> list[str]:
    """The names of the modules whose products are made in fp8."""
    replaced = ("forward", "base", "base_product")
    return [name for name, module in model.named_modules() if any(product in vars(module) for product in replaced)]


def takes_fp8(module: nn.Module) -> bool:
    """Whether a module of a layer is one whose products can be made in fp8: its kind and its sizes."""
    if isinstance(module, MoE):
        return suits(module.gate_up) and suits(module.down)
    if isinstance(module, MLP):
        return suits(module.gate_up.weight) and suits(module.down.weight)
    return isinstance(module, nn.Linear) and suits(module.weight)


def suits(weight: Tensor) -> bool:
    return not any(size % MULTIPLE for size in weight.shape[-2:])


def linear(module: nn.Linear, x: Tensor, weights: WeightCodes | None = None) -> Tensor:
    y = in_fp8(x.reshape(-1, x.shape[-1]), module.weight, weights=weights)
    y = y if module.bias is None else y + module.bias.to(y.dtype)
    return y.view(*x.shape[:-1], module.out_features)
