"""The numbers that a weight may become: steps of a scale around a zero point, which neighbours of a row share.

    number = (code - zero) · scale        int4: 0 ≤ code ≤ 15      int8: -128 ≤ code ≤ 127      fp8: any float8_e4m3fn

Symmetric grids have their zero point in the middle of the codes and reach as far below zero as above. Asymmetric ones, of
integers, reach from the group's smallest number, or zero, to its largest, or zero. A grid may reach less far than its
numbers do (`reach` below 1): what lies outside is clipped, and the steps inside are finer.

Every method that chooses numbers ends here: they are put on a grid, and `Grid.encode` writes them as codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack.ops.numerics import wide
from tilestack.ops.quantised import LARGEST_CODE, SMALLEST_ROW
from tilestack.ops.weight_only import CENTRE, FORMATS, pack_int4
from tilestack.quant.schemes import Codes, Scheme

RANGES = dict(int4=(0, 15), int8=(-128, 127))
LARGEST = dict(int4=7, int8=LARGEST_CODE[torch.int8], fp8=LARGEST_CODE[torch.float8_e4m3fn])  # of symmetric codes


@dataclass(frozen=True)
class Grid:
    """The grids of a weight [out, in]: a scale and a zero point for each of `groups` equal parts of a row."""

    scheme: Scheme
    scale: Tensor  # [out, groups]
    zero: Tensor  # [out, groups], whole numbers

    def codes(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The codes nearest to values, as numbers of their dtype."""
        if self.scheme.weights == "fp8":
            most = LARGEST["fp8"]
            return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn).to(values.dtype)
        return ((values / scale).round() + zero).clamp(*RANGES[self.scheme.weights])

    def nearest(self, weight: Tensor) -> Tensor:
        """The numbers on the grid nearest to a weight, [out, in]."""
        values, scale, zero = self.grouped(weight), self.scale[..., None], self.zero[..., None]
        return ((self.codes(values, scale, zero) - zero) * scale).flatten(1)

    def nearest_in_column(self, values: Tensor, column: int, columns: int) -> Tensor:
        """The numbers nearest to one of a weight's columns, [out]."""
        group = column * self.scale.shape[1] // columns
        scale, zero = self.scale[:, group], self.zero[:, group]
        return (self.codes(values, scale, zero) - zero) * scale

    def encode(self, weight: Tensor) -> Codes:
        """The codes of a weight, whose numbers go to the nearest on the grid."""
        found = self.codes(self.grouped(weight), self.scale[..., None], self.zero[..., None]).flatten(1)
        codes = pack_int4(found) if self.scheme.weights == "int4" else found.to(FORMATS[self.scheme.weights])
        return Codes(codes, self.scale, None if self.scheme.symmetric else self.zero.to(torch.int8))

    def grouped(self, weight: Tensor) -> Tensor:
        return wide(weight).unflatten(1, (self.scale.shape[1], -1))


def grid_of(weight: Tensor, scheme: Scheme, reach: float = 1.0) -> Grid:
    """The grids that reach as far as the numbers of each group do, or a part of it."""
    inner = weight.shape[1]
    values = wide(weight.detach()).unflatten(1, (-1, scheme.group_of(inner) or inner))
    if scheme.symmetric:
        scale = (values.abs().amax(-1) * reach).clamp_min(SMALLEST_ROW) / LARGEST[scheme.weights]
        return Grid(scheme, scale, torch.full_like(scale, CENTRE if scheme.weights == "int4" else 0))
    least, most = RANGES[scheme.weights]
    low, high = values.amin(-1).clamp_max(0) * reach, values.amax(-1).clamp_min(0) * reach
    scale = (high - low).clamp_min(SMALLEST_ROW) / (most - least)
    return Grid(scheme, scale, (least - low / scale).round())
