"""What a linear layer's numbers become: its weight's codes, how many of them share a scale, and the numbers of its input.

    scheme   weight                                                      input, where rows are many
    fp8      float8_e4m3fn, a scale for each output                      float8_e4m3fn, a scale for each row
    w8a8     int8, a scale for each output                               int8, a scale for each row
    w8a16    int8, a scale for each output                               as it is
    w4a16    4 bits, two to a byte, a scale for 128 numbers of an output  as it is

A number of the weight is (code - zero) · scale. Scales of inputs are found as they come, so nothing about inputs is kept.
Checkpoints have more than these: other groups, zero points, and fp8 with a scale for 128 by 128 numbers (`blocks`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilestack.ops.fp8_tiles import codes_by
from tilestack.ops.quantised_linear import BLOCK, E4M3
from tilestack.ops.weight_only import CENTRE, FORMATS, PACKED, quantise_weight, unpack_int4


class Codes(NamedTuple):
    """A quantised weight [out, in], as `ops.linear_weight_only` reads it."""

    codes: Tensor  # int8 or float8_e4m3fn [out, in], or two codes of 4 bits a byte, uint8 [out, in / 2]
    scale: Tensor  # [out, groups]; outputs that share a block repeat its scale
    zero: Tensor | None  # int8 [out, groups]

    def numbers(self) -> Tensor:
        """The weight [out, in] that they stand for, in float32."""
        packed = self.codes.dtype == torch.uint8
        groups = (unpack_int4(self.codes) if packed else self.codes).float().unflatten(1, (self.scale.shape[1], -1))
        zeros = (CENTRE if packed else 0) if self.zero is None else self.zero.float()[..., None]
        return ((groups - zeros) * self.scale.float()[..., None]).flatten(1)

    def each(self, function: Callable[[Tensor], Tensor]) -> "Codes":
        """What a function makes of each of the tensors that are there."""
        return Codes(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def split(self, rows: list[int]) -> list["Codes"]:
        """The codes of each of several matrices that lie one below the other, by how many rows they have."""
        parts = [[None] * len(rows) if each is None else each.split(rows) for each in self]
        return [Codes(*some) for some in zip(*parts, strict=True)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scheme:
    """The numbers of a linear layer. `group` numbers of a weight's row share a scale, the whole row when it is 0."""

    weights: str  # int4, int8 or fp8
    group: int = 0
    symmetric: bool = True  # otherwise each group has a zero point
    activations: str | None = None  # int8 or fp8: the input's rows become codes where there are many
    blocks: bool = False  # of fp8: 128 by 128 numbers of a weight share a scale, and 128 of an input's row

    def __post_init__(self) -> None:
        if self.weights not in FORMATS:
            raise ValueError(f"weights are {', '.join(FORMATS)}, not {self.weights!r}")
        if self.activations not in (None, self.weights) or self.activations == "int4":
            raise ValueError(
                f"an input's numbers are int8 or fp8 as the weight's are, or stay as they are; not {self.activations!r} "
                f"beside {self.weights}"
            )
        if self.blocks and (self.weights != "fp8" or self.group != BLOCK):
            raise ValueError(
                f"blocks are of fp8, in groups of {BLOCK}, not of {self.weights} in groups of {self.group}"
            )
        if self.activations and ((self.group and not self.blocks) or not self.symmetric):
            raise ValueError("products of codes take a scale for each output or for blocks, without zero points")

    def group_of(self, inner: int) -> int:
        """How many numbers share a scale in rows of `inner`: the largest part of `group` that divides them."""
        return math.gcd(self.group, inner) if self.group else 0

    def takes(self, inner: int) -> bool:
        """Whether rows of `inner` numbers can be such codes."""
        return self.weights != "int4" or inner % PACKED == 0

    def round_to_nearest(self, weight: Tensor) -> Codes:
        if self.blocks:
            codes, scale = codes_by(weight.detach(), "blocks", E4M3)
            return Codes(codes, scale_of_rows(scale, *weight.shape), None)
        return Codes(*quantise_weight(weight, self.weights, self.group_of(weight.shape[1]), self.symmetric))


def scale_of_rows(blocks: Tensor, rows: int, inner: int) -> Tensor:
    """Scales of blocks [⌈rows / 128⌉, ⌈inner / 128⌉] as `Codes` have them: [rows, groups], where groups of 128 numbers are as
    much smaller as it takes for them to be whole."""
    group = math.gcd(BLOCK, inner)
    return blocks.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK // group, 1)[:, : inner // group]


SCHEMES = {
    "fp8": Scheme("fp8", activations="fp8"),
    "w8a8": Scheme("int8", activations="int8"),
    "w8a16": Scheme("int8"),
    "w4a16": Scheme("int4", group=128),
}
