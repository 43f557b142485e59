"""silu(gate) * up whose rows come out as codes and a scale, for the quantised down projection. No gradients."""

from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import ROW_CHECKS, cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.activation import silu
from tilestack.ops.gated import BENCHES, alike, two_halves
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import quantised


def rows_alike(gate: Tensor, up: Tensor) -> bool | str:
    if gate.ndim == 0 or gate.shape[-1] == 0:
        return f"a row without elements has no scale, but gate has shape {tuple(gate.shape)}"
    return alike(gate, up)


contract: dict[str, Any] = dict(
    cases=cases(two_halves, check=[size for size in ROW_CHECKS if size[-1]], bench=BENCHES),
    cost=lambda gate: Cost(flops=8 * gate.numel()),
    check=rows_alike,
    outputs=("codes", "scale"),
)


@operator(**contract)
def silu_mul_int8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """silu_mul as int8 codes [..., columns] and a float32 scale per row [...]: the product is codes * scale."""
    return quantised(silu.definition(wide(gate)) * wide(up), torch.int8)


@operator(**contract)
def silu_mul_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """silu_mul as float8_e4m3fn codes [..., columns] and a float32 scale per row [...]: the product is codes * scale."""
    return quantised(silu.definition(wide(gate)) * wide(up), torch.float8_e4m3fn)
