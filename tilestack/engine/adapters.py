"""LoRA adapters side by side: each token of a batch goes through the adapter of its own request, or through none.

All adapters of a layer lie below each other, A [Σ rank, in] and B [out, Σ rank], and between the two products a token
keeps only the columns of its own:

    y = x Wᵀ + ((x Aᵀ) · columns[adapter of the token]) Bᵀ          columns: its scale in its own ranks, else 0

Two thin products for all requests, of a shape that does not depend on who asked for what.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tilestack import ops
from tilestack.engine.cpu_weights import CodedLinear, Int8Linear
from tilestack.models import Decoder
from tilestack.models.adapters import AdapterError, read_adapters
from tilestack.nn import Linear
from tilestack.quant import QuantisedLinear

ADAPTABLE = (Linear, QuantisedLinear, CodedLinear, Int8Linear)


class AdaptedLinear(Linear):
    """A linear layer with the adapters of all requests beside it; made by `ServedAdapters`."""

    served: "ServedAdapters"
    base: Callable[[Tensor], Tensor]  # what the layer is without them, of plain weights or of codes
    lora_A: Tensor  # [Σ rank, in]
    lora_B: Tensor  # [out, Σ rank]
    columns: Tensor  # [adapters + 1, Σ rank]

    def forward(self, input: Tensor) -> Tensor:
        out = self.base(input)
        if self.served.tokens is None:
            return out
        inner = ops.linear(input, self.lora_A) * self.columns[self.served.tokens]
        return out + ops.linear(inner, self.lora_B)


class ServedAdapters:
    """Adapters by name, loaded beside a decoder's layers; a request's adapter is a number, 0 for none."""

    def __init__(self, decoder: Decoder, folders: Mapping[str, Path | str]):
        self.numbers = {name: number for number, name in enumerate(folders, 1)}
        self.device = decoder.embedding.weight.device
        self.tokens: Tensor | None = None  # [T]: the adapter of each token in the batch
        read = [read_adapters(decoder, folder) for folder in folders.values()]
        for path in dict.fromkeys(path for found, _ in read for path in found):
            layer = decoder.get_submodule(path) if path in dict(decoder.named_modules()) else None
            # Attention over latents takes the whole matrix of `kv_up`, not its products with tokens.
            by_tokens = path != "head" and not path.endswith(".kv_up")
            if not isinstance(layer, Linear) or type(layer) not in ADAPTABLE or not by_tokens:
                raise AdapterError(
                    f"adapters of {path} cannot be chosen per request; merge them into the model instead"
                )
            parts = [(found[path], scale) if path in found else None for found, scale in read]
            beside(layer, [part for part in parts if part], [scale_and_rank(part) for part in parts], self)

    @contextmanager
    def chosen(self, tokens: Tensor) -> Iterator[None]:
        """Within it, the batch has tokens of these adapters [T]."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None


def scale_and_rank(part: tuple[tuple[Tensor, Tensor], float] | None) -> tuple[float, int]:
    return (0.0, 0) if part is None else (part[1], len(part[0][0]))


def beside(
    layer: Linear,
    parts: Sequence[tuple[tuple[Tensor, Tensor], float]],
    scales_and_ranks: Sequence[tuple[float, int]],
    served: ServedAdapters,
) -> None:
    """Make a layer one with adapters beside it."""
    like = lambda tensor: tensor.to(served.device, layer.weight.dtype)
    base = layer.forward
    layer.__class__ = AdaptedLinear
    assert isinstance(layer, AdaptedLinear)
    layer.served, layer.base = served, base
    layer.lora_A = like(torch.cat([a for (a, _), _ in parts]))
    layer.lora_B = like(torch.cat([b for (_, b), _ in parts], 1))
    columns = torch.zeros(len(scales_and_ranks) + 1, len(layer.lora_A))
    first = 0
    for number, (scale, rank) in enumerate(scales_and_ranks, 1):
        columns[number, first : first + rank] = scale
        first += rank
    layer.columns = like(columns)
