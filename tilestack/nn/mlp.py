"""The feed-forward layer of a decoder: a gated pair between two projections."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import lowered
from tilestack.nn.invariance import invariant_wanted
from tilestack.nn.modules import Linear

ACTIVATIONS = ("silu", "gelu_tanh")


class MLP(torch.nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one projection, gate first.

    With silu, the gated pair and `down` are one operator, unless something else has taken the place of `down` or listens
    to it, or results must be batch-invariant, which the joint operator does not promise.
    """

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be {' or '.join(ACTIVATIONS)}, not {activation!r}")
        self.activation = activation
        self.gate_up = Linear(hidden, 2 * intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if self.activation == "gelu_tanh":
            return self.down(ops.geglu(gate_up, "tanh"))
        if is_untouched(self.down) and not invariant_wanted():
            return ops.swiglu_linear(*lowered(gate_up, self.down.weight, self.down.bias))
        return self.down(ops.swiglu(gate_up))


def is_untouched(module: torch.nn.Module) -> bool:
    """Whether calling a module is what Linear does and no more: no adapter, no other precision, no hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return type(module) is Linear and "forward" not in module.__dict__ and not any(hooks)
