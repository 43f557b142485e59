"""Rows as they are, made codes and a scale: for a quantised product that no norm or activation comes before. No gradients."""

from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import ROW_CHECKS, cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import quantised


def are_rows(x: Tensor) -> bool | str:
    return (x.ndim > 0 and x.shape[-1] > 0) or f"a row without elements has no scale, but x has shape {tuple(x.shape)}"


contract: dict[str, Any] = dict(
    cases=cases(
        lambda make, *shape: dict(x=make.normal(*shape)),
        check=[*(size for size in ROW_CHECKS if size[-1]), (2, 33000)],
        bench=[(4096, 4096), (8192, 4096), (8192, 8192), (8192, 14336)],
    ),
    cost=lambda x: Cost(flops=3 * x.numel()),
    check=are_rows,
    outputs=("codes", "scale"),
)


@operator(**contract)
def quantise_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as int8 codes [..., columns] and a float32 scale per row [...]: x is codes * scale, as `linear_int8` takes it."""
    return quantised(wide(x), torch.int8)


@operator(**contract)
def quantise_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn codes [..., columns] and a float32 scale per row [...]: x is codes * scale, as `linear_fp8` takes it."""
    return quantised(wide(x), torch.float8_e4m3fn)
