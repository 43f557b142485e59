"""LoRA: a frozen linear layer plus a trained product of two thin matrices, y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ.

    add_lora(model, ["*.qkv", "*.down"], rank=8)     # freezes the model, adapts the layers whose paths match
    with without_lora(model): ...                    # the model as it was before: the reference of DPO and GRPO
    merge_lora(model)                                # W += (alpha / rank) · B A, and plain layers again

B begins as zero, so an adapted model first computes exactly what the model did. A layer is adapted by giving the same
object another class, as `tilestack.patch` does: its weight keeps its name, its place and what is tied to it.
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

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if not self.active:
            return out
        x = F.dropout(input, self.dropout, self.training)
        # The adapter is stored wide, so that small steps are not lost, and computed in the dtype of its layer.
        inner = ops.linear(*lowered(x, self.lora_A.to(x.dtype), None))
        return out + self.scale * ops.linear(*lowered(inner, self.lora_B.to(inner.dtype), None))

    def delta(self) -> Tensor:
        """What the adapter adds to the weight, [out, in], in the adapter's dtype."""
        return self.scale * (self.lora_B @ self.lora_A)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}"


def add_lora(
    model: torch.nn.Module, targets: Iterable[str], rank: int = 8, alpha: float = 16.0, dropout: float = 0.0
) -> dict[str, LoRALinear]:
    """Freezes the model and adapts the linear layers whose paths match one of the patterns; returns them by path."""
    targets = list(targets)
    if rank < 1 or not 0 <= dropout < 1 or not alpha > 0:
        raise ValueError(f"lora needs rank ≥ 1, alpha > 0 and 0 ≤ dropout < 1, not {rank}, {alpha:g} and {dropout:g}")
    if lora_layers(model):
        raise ValueError("the model has adapters already; merge_lora first")
    linears = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if unmatched := [pattern for pattern in targets if not fnmatch.filter(linears, pattern)]:
        known = sorted({path.rpartition(".")[2] for path in linears})
        raise ValueError(
            f"lora: no linear layer is named {', '.join(unmatched)}; their names end in {', '.join(known)}"
        )
    chosen = {path for pattern in targets for path in fnmatch.filter(linears, pattern)}
    if not chosen:
        raise ValueError("lora needs at least one pattern of layers to adapt, such as '*.qkv'")
    model.requires_grad_(False)
    return {path: adapted(module, rank, alpha, dropout) for path, module in linears.items() if path in chosen}


def adapted(layer: torch.nn.Linear, rank: int, alpha: float, dropout: float) -> LoRALinear:
    if type(layer) not in (Linear, torch.nn.Linear):
        raise TypeError(f"lora adapts Linear, not its subclass {type(layer).__name__}")
    wide = torch.promote_types(layer.weight.dtype, torch.float32)
    make = lambda *shape: torch.nn.Parameter(torch.zeros(*shape, dtype=wide, device=layer.weight.device))
    layer.lora_A, layer.lora_B = make(rank, layer.in_features), make(layer.out_features, rank)
    torch.nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.__class__ = LoRALinear
    assert isinstance(layer, LoRALinear)
    layer.alpha, layer.dropout, layer.active = alpha, dropout, True
    return layer


def lora_layers(model: torch.nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def lora_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The adapters' parameters, named as the model names them."""
    for path, layer in lora_layers(model).items():
        for name in ("lora_A", "lora_B"):
            yield f"{path}.{name}" if path else name, getattr(layer, name)


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
    for layer in lora_layers(model).values():
        layer.weight.copy_(layer.weight + layer.delta())
        for name in ("lora_A", "lora_B", "alpha", "dropout", "active"):
            delattr(layer, name)
        layer.__class__ = Linear  # type: ignore[assignment]
    model.requires_grad_(True)
