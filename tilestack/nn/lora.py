"""LoRA: a frozen linear layer plus a trained product of two thin matrices, y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ.

    add_lora(model, ["*.qkv", "*.down"], rank=8)     # freezes the model, adapts the layers whose paths match
    with without_lora(model): ...                    # the model as it was before: the reference of DPO and GRPO
    merge_lora(model)                                # W += (alpha / rank) · B A, and plain layers again

B begins as zero, so an adapted model first computes exactly what the model did. A layer is adapted by giving the same
object another class, as `tilestack.patch` does: its weight keeps its name, its place and what is tied to it. The experts of
a mixture are one parameter, [experts, out, in]; beside it lies an adapter with an A and a B for each of them.
"""

import fnmatch
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import lowered
from tilestack.nn.modules import Linear
from tilestack.nn.moe import MoE


class LoRALinear(Linear):
    """A linear layer with an adapter beside it; made by `add_lora`, not by itself."""

    lora_A: torch.nn.Parameter  # [rank, in]
    lora_B: torch.nn.Parameter  # [out, rank]
    alpha: float
    dropout: float
    active: bool

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def base(self, input: Tensor) -> Tensor:
        """The frozen layer's part; whoever computes it in another way, as fp8 does, replaces this and not `forward`."""
        return super().forward(input)

    def forward(self, input: Tensor) -> Tensor:
        out = self.base(input)
        if not self.active:
            return out
        x = F.dropout(input, self.dropout, self.training)
        # The adapter is stored wide, so that small steps are not lost, and computed in the dtype of its layer.
        inner = ops.linear(*lowered(x, self.lora_A.to(x.dtype), None))
        return out + self.scale * ops.linear(*lowered(inner, self.lora_B.to(inner.dtype), None))

    def delta(self) -> Tensor:
        """What the adapter adds to the weight, [out, in], in the adapter's dtype."""
        return self.scale * (self.lora_B @ self.lora_A)

    @property
    def adapted_weight(self) -> Tensor:
        """The weight with the adapter in it, for heads, which are products within losses and not layers that are called.
        No dropout reaches it."""
        return (self.weight + self.delta()).to(self.weight.dtype) if self.active else self.weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}"


class ExpertLoRA(torch.nn.Module):
    """Adapters beside a parameter of all experts, [experts, out, in]; what they add to rows that are sorted by expert."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, dropout: float):
        super().__init__()
        experts, out, width = weight.shape
        self.lora_A, self.lora_B = new_adapter(weight, (experts, rank, width), (experts, out, rank))
        self.alpha, self.dropout, self.active = alpha, dropout, True

    @property
    def rank(self) -> int:
        return self.lora_A.shape[1]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        x = F.dropout(rows, self.dropout, self.training)
        inner = ops.grouped_linear(x, self.lora_A.to(x.dtype), offsets)
        return self.scale * ops.grouped_linear(inner, self.lora_B.to(x.dtype), offsets)

    def delta(self) -> Tensor:
        """What the adapters add to the parameter, in their dtype."""
        return self.scale * (self.lora_B @ self.lora_A)

    def extra_repr(self) -> str:
        return f"{self.lora_A.shape[0]} experts, rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}"


Adapter = LoRALinear | ExpertLoRA


def add_lora(
    model: torch.nn.Module, targets: Iterable[str], rank: int = 8, alpha: float = 16.0, dropout: float = 0.0
) -> dict[str, Adapter]:
    """Freezes the model and adapts the linear layers and parameters of experts whose paths match one of the patterns;
    returns the adapters by path."""
    targets = list(targets)
    if rank < 1 or not 0 <= dropout < 1 or not alpha > 0:
        raise ValueError(f"lora needs rank ≥ 1, alpha > 0 and 0 ≤ dropout < 1, not {rank}, {alpha:g} and {dropout:g}")
    if lora_layers(model):
        raise ValueError("the model has adapters already; merge_lora first")
    found = adaptable(model)
    if unmatched := [pattern for pattern in targets if not fnmatch.filter(found, pattern)]:
        known = sorted({path.rpartition(".")[2] for path in found})
        raise ValueError(
            f"lora: no linear layer is named {', '.join(unmatched)}; their names end in {', '.join(known)}"
        )
    chosen = {path for pattern in targets for path in fnmatch.filter(found, pattern)}
    if not chosen:
        raise ValueError("lora needs at least one pattern of layers to adapt, such as '*.qkv'")
    model.requires_grad_(False)
    return {path: adapted(layer, path, rank, alpha, dropout) for path, layer in found.items() if path in chosen}


def adaptable(model: torch.nn.Module) -> dict[str, torch.nn.Linear | MoE]:
    """What adapters can be put on, by path: linear layers, and mixtures by the paths of their experts' parameters."""
    found: dict[str, torch.nn.Linear | MoE] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[path] = module
        elif isinstance(module, MoE):
            found |= {f"{path}.{name}" if path else name: module for name in module.ADAPTABLE}
    return found


def adapted(layer: torch.nn.Linear | MoE, path: str, rank: int, alpha: float, dropout: float) -> Adapter:
    if isinstance(layer, MoE):
        name = path.rpartition(".")[2]
        made = ExpertLoRA(getattr(layer, name), rank, alpha, dropout)
        setattr(layer, f"{name}_lora", made)
        return made
    if type(layer) not in (Linear, torch.nn.Linear):
        raise TypeError(f"lora adapts Linear, not its subclass {type(layer).__name__}")
    layer.lora_A, layer.lora_B = new_adapter(layer.weight, (rank, layer.in_features), (layer.out_features, rank))
    layer.__class__ = LoRALinear
    assert isinstance(layer, LoRALinear)
    layer.alpha, layer.dropout, layer.active = alpha, dropout, True
    return layer


def new_adapter(
    weight: Tensor, a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """A, drawn as a linear layer's weight is, and B, which is zero; at least float32, so that small steps are not lost."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    make = lambda shape: torch.nn.Parameter(torch.zeros(shape, dtype=wide, device=weight.device))
    made = make(a), make(b)
    for matrix in made[0].view(-1, *a[-2:]):
        torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
    return made


def lora_layers(model: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters by the paths of what they adapt."""
    return {
        path.removesuffix("_lora") if isinstance(module, ExpertLoRA) else path: module
        for path, module in model.named_modules()
        if isinstance(module, LoRALinear | ExpertLoRA)
    }


def lora_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The adapters' parameters, named as the model names them."""
    owners = {id(parameter) for layer in lora_layers(model).values() for parameter in (layer.lora_A, layer.lora_B)}
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) in owners)


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the adapters add nothing."""
    layers = [layer for layer in lora_layers(model).values() if layer.active]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


@torch.no_grad()
def merge_lora(model: torch.nn.Module) -> None:
    """Adds each adapter to the weight beside it and takes it away; every parameter can be trained again."""
    for path, layer in lora_layers(model).items():
        if isinstance(layer, ExpertLoRA):
            place, _, name = path.rpartition(".")
            mixture = model.get_submodule(place)
            getattr(mixture, name).add_(layer.delta())
            setattr(mixture, f"{name}_lora", None)
            continue
        layer.weight.copy_(layer.weight + layer.delta())
        for attribute in ("lora_A", "lora_B", "alpha", "dropout", "active"):
            delattr(layer, attribute)
        vars(layer).pop("base", None)
        layer.__class__ = Linear  # type: ignore[assignment]
    model.requires_grad_(True)
