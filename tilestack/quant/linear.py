"""A linear layer of codes, for inference.

Decoding takes as long as its weights take to be read, so half of the bytes is half of the time. A product of few rows makes
numbers of the codes on their way to the tensor cores: weights are rounded, once, and nothing else. Of many rows, as prompts
have, the arithmetic takes longer than the reading, and tensor cores multiply codes of 8 bits twice as fast as half
precisions; so where the scheme says so, there the rows become codes too, each with a scale of its own. That is a rounding
that steps of few rows do not have, and float32, which is asked for its digits, does without it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn import Linear
from tilestack.quant.schemes import Codes, Scheme

FEW = 64  # rows whose product with codes is taken up by reading them


class QuantisedLinear(Linear):
    """A layer of codes; made by `quantise_linear`."""

    scheme: Scheme
    codes: Tensor  # [out, in], or [out, in / 2] of 4 bits
    code_scale: Tensor  # [out, groups]
    code_zero: Tensor | None  # [out, groups]

    def forward(self, input: Tensor) -> Tensor:
        if self.scheme.activations and has_many_rows(input):
            quantise, product = PRODUCTS[self.scheme.activations]
            rows, scale = quantise(input)
            dtype = f"{input.dtype}".removeprefix("torch.")
            return product(rows, self.codes, scale, self.code_scale[:, 0], self.bias, dtype=dtype)
        return ops.linear_weight_only(input, self.codes, self.code_scale, self.code_zero, self.bias)


PRODUCTS: dict[str, tuple[Callable, Callable]] = dict(
    fp8=(ops.quantise_rows_fp8, ops.linear_fp8), int8=(ops.quantise_rows_int8, ops.linear_int8)
)


def has_many_rows(input: Tensor) -> bool:
    """Whether rows of half precision are so many that they are better multiplied as codes."""
    return input.dtype in (torch.bfloat16, torch.float16) and input.shape[:-1].numel() > FEW


@torch.no_grad()
def quantise_linear(layer: Linear, scheme: Scheme, codes: Codes | None = None) -> None:
    """Make a layer one of codes, in place: those given, or its weight rounded to the nearest."""
    found = scheme.round_to_nearest(layer.weight) if codes is None else codes
    layer.__class__ = QuantisedLinear
    layer.scheme = scheme  # type: ignore[assignment]
    layer.codes, layer.code_scale, layer.code_zero = found  # type: ignore[assignment]
    drop_weight(layer)


def drop_weight(layer: Linear) -> None:
    """Keep the shape of a weight and no longer the weight."""
    layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
