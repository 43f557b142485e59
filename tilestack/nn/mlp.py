"""The feed-forward layer of a decoder: a gated pair between two projections."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.modules import Linear
from tilestack.nn.recompute import not_keeping


class MLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one projection, gate first."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False):
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        gated = ops.swiglu(gate_up)
        with not_keeping(gated, ops.swiglu, gate_up):
            return self.down(gated)
