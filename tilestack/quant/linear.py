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
from tilestack.ops.quantised_linear import BLOCK
from tilestack.quant.schemes import Codes, Scheme, scale_of_rows

FEW = 64  # rows whose product with codes is taken up by reading them


class QuantisedLinear(Linear):
    """A layer of codes; made by `quantise_linear`."""

    scheme: Scheme
    codes: Tensor  # [out, in], or [out, in / 2] of 4 bits
    code_scale: Tensor  # [out, groups]
    code_zero: Tensor | None  # [out, groups]
    product_scale: Tensor | None  # as a product of codes takes it, where there is one: [out], or of blocks

    def forward(self, input: Tensor) -> Tensor:
        if self.scheme.activations and self.product_scale is not None and has_many_rows(input):
            quantise, product = PRODUCTS[self.scheme.activations]
            rows, scale = quantise(input.unflatten(-1, (-1, BLOCK)) if self.scheme.blocks else input)
            dtype = f"{input.dtype}".removeprefix("torch.")
            return product(rows.view(input.shape), self.codes, scale, self.product_scale, self.bias, dtype=dtype)
        return ops.linear_weight_only(input, self.codes, self.code_scale, self.code_zero, self.bias)

    @property
    def kept(self) -> Codes:
        return Codes(self.codes, self.code_scale, self.code_zero)


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
    layer.product_scale = scale_of_product(scheme, found)  # type: ignore[assignment]
    drop_weight(layer)


def scale_of_product(scheme: Scheme, codes: Codes) -> Tensor | None:
    """The scales that a product of codes takes, or None where there is no such product: of inputs that stay as they are, and
    of blocks that do not lie in one grid, as where a matrix is several that end within a block."""
    if not scheme.activations:
        return None
    if not scheme.blocks:
        return codes.scale[:, 0]
    rows, inner = codes.codes.shape
    if inner % BLOCK:
        return None
    grid = codes.scale[::BLOCK].contiguous()
    return grid if scale_of_rows(grid, rows, inner).equal(codes.scale) else None


def drop_weight(layer: Linear) -> None:
    """Keep the shape of a weight and no longer the weight."""
    layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
