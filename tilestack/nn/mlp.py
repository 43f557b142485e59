"""The feed-forward layer of a decoder: a gated pair between two projections."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import lowered
from tilestack.nn.invariance import invariant_wanted
from tilestack.nn.modules import Linear

ACTIVATIONS = ("silu", "gelu_tanh")
FEW = 64  # rows that a decoding step has


class MLP(torch.nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one projection, gate first.

    With silu, the gated pair and `down` are one operator, or `gate_up` and the gated pair where rows are few and nobody
    asks for gradients; unless something else has taken the place of these or listens to them, or results must be
    batch-invariant, which the joint operators do not promise.
    """

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be {' or '.join(ACTIVATIONS)}, not {activation!r}")
        self.activation = activation
        self.gate_up = Linear(hidden, 2 * intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.activation == "silu" and is_untouched(self.down) and not invariant_wanted()
        if joint and is_untouched(self.gate_up) and few_to_infer(x):
            hidden = ops.linear_swiglu(*lowered(x, self.gate_up.weight, self.gate_up.bias))
            return ops.linear(*lowered(hidden, self.down.weight, self.down.bias))
        gate_up = self.gate_up(x)
        if self.activation == "gelu_tanh":
            return self.down(ops.geglu(gate_up, "tanh"))
        if joint:
            return ops.swiglu_linear(*lowered(gate_up, self.down.weight, self.down.bias))
        return self.down(ops.swiglu(gate_up))


def few_to_infer(x: Tensor) -> bool:
    """Whether rows are few, as in decoding, and no gradients wanted."""
    return not torch.is_grad_enabled() and x.shape[:-1].numel() <= FEW


def is_untouched(module: torch.nn.Module) -> bool:
    """Whether calling a module is what Linear does and no more: no adapter, no other precision, no hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return type(module) is Linear and "forward" not in module.__dict__ and not any(hooks)
