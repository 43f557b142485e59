"""A matrix as fp8 codes twice, as it lies and turned, from one reading of it: what training in fp8 makes of its operands.

A layer's three products add up over three different dimensions, and fp8 operands must lie along the one that is added up:

    y = x wᵀ   over K         dx = dy w   over N         dw = dyᵀ x   over M

so x, w and dy are each needed both ways. Scales of 128 codes along that dimension, or of 128 by 128, are found within a
tile of 128 by 128: nothing has to be known of the rest of the matrix. A stack of matrices, as experts have, is coded matrix
by matrix. No gradients.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import quantised
from tilestack.ops.quantised_linear import BLOCK, E4M3, blocks_of

SHARED_BY = ("rows", "blocks")


def tiles_case(make, rows, columns, by, turned_by, matrices=0):
    return dict(x=make.normal(*[matrices] if matrices else [], rows, columns), by=by, turned_by=turned_by)


def tiles_fit(x: Tensor, by: str, turned_by: str) -> bool | str:
    if x.ndim not in (2, 3) or x.numel() == 0:
        return f"x must be a matrix, or a stack of them, that is not empty, not {tuple(x.shape)}"
    wrong = next((name for name in (by, turned_by) if name not in SHARED_BY), None)
    return wrong is None or f"a scale is shared by {' or '.join(SHARED_BY)}, not {wrong!r}"


def codes_by(x: Tensor, by: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes like x, scales): of 128 neighbours of a row, or of 128 by 128."""
    (rows, columns), down, across = x.shape[-2:], blocks_of(x.shape[-2]), blocks_of(x.shape[-1])
    tiles = torch.nn.functional.pad(wide(x), (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    tiles = tiles.unflatten(-1, (across, BLOCK)).unflatten(-3, (down, BLOCK)).transpose(-3, -2)  # tile by tile
    codes, scale = quantised(tiles if by == "rows" else tiles.flatten(-2), dtype)
    codes = codes.view(tiles.shape).transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    if by == "rows":
        scale = scale.transpose(-2, -1).flatten(-3, -2)[..., :rows, :]
    return codes.contiguous(), scale.contiguous()


@operator(
    cases=cases(
        tiles_case,
        check=[
            (1, 1, "rows", "rows"),
            (130, 40, "rows", "blocks"),
            (64, 260, "blocks", "blocks"),
            (128, 128, "blocks", "rows"),
            (160, 144, "blocks", "blocks"),
            (144, 272, "rows", "rows"),
            (160, 16, "rows", "blocks", 2),
            (131, 5, "blocks", "rows", 3),
        ],
        bench=[(65536, 1024, "rows", "blocks"), (65536, 3072, "rows", "rows"), (3072, 1024, "blocks", "blocks")],
    ),
    cost=lambda x: Cost(flops=4 * x.numel()),
    check=tiles_fit,
    outputs=("codes", "scale", "turned", "turned_scale"),
)
def fp8_tiles(x: Tensor, by: str = "rows", turned_by: str = "blocks") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x as float8_e4m3fn codes and scales, and x.mT as codes and scales, as `linear_fp8` takes them by blocks.

    By rows, 128 neighbours of a row share a scale, [rows, blocks], as on its left side; by blocks, 128 by 128 do,
    [blocks, blocks], as in its weight. `turned_by` says the same of x.mT. Of a stack, [matrices, rows, columns], all four
    are stacks.
    """
    return *codes_by(x, by, E4M3), *codes_by(x.mT, turned_by, E4M3)
