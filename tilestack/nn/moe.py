"""A mixture of experts: many feed-forward layers, of which each token goes through a few.

Tokens are sorted by expert, so that an expert's tokens are neighbours and all experts together are one grouped product
per projection: no capacity, no padding, no token dropped, and no waiting to learn how many tokens an expert has.

    tokens [T, H]    chosen [T, K]          sorted by expert [T * K, H]     back to tokens, weighted
       t0             e2  e0                 e0: t0 t3                       t0 = w e2(t0) + w e0(t0)
       t1             e1  e2        →        e1: t1                   →      ...
       ...                                   e2: t0 t1 ...

Shapes: T tokens, H hidden, I intermediate, E experts, K experts of each token.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import lowered
from tilestack.nn.mlp import MLP
from tilestack.nn.modules import Linear
from tilestack.nn.router import Balance, Router


class MoE(torch.nn.Module):
    """A drop-in for MLP: [..., hidden] to [..., hidden], through the top_k of `experts` feed-forward layers.

    See Router for scoring, normalise, scale, groups and top_groups. With `shared_intermediate` an MLP of that width is
    added that every token goes through, times the sigmoid of a projection of the token with `shared_gate`. With
    `bias_balancing` the router has a bias, which `update_bias` moves after each step. After a forward with
    gradients, `balance` holds its loads and losses.
    """

    ADAPTABLE: ClassVar[tuple[str, ...]] = (
        "gate_up",
        "down",
    )  # the experts' parameters, which `add_lora` may put an adapter beside

    balance: Balance | None
    shared: MLP | None
    shared_gate: Linear | None
    gate_up_lora: torch.nn.Module | None
    down_lora: torch.nn.Module | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        bias_balancing: bool = False,
    ):
        super().__init__()
        if shared_gate and not shared_intermediate:
            raise ValueError("shared_gate needs shared experts to gate; give shared_intermediate too")
        self.router = Router(
            hidden,
            experts,
            top_k,
            scoring=scoring,
            normalise=normalise,
            scale=scale,
            groups=groups,
            top_groups=top_groups,
            bias=bias_balancing,
        )
        self.gate_up = torch.nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down = torch.nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.shared = MLP(hidden, shared_intermediate) if shared_intermediate else None
        self.shared_gate = Linear(hidden, 1, bias=False) if shared_gate else None
        self.gate_up_lora, self.down_lora = None, None
        self.balance = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch.nn.Linear does for each expert."""
        for weight in (self.gate_up, self.down):
            bound = 1 / math.sqrt(max(weight.shape[2], 1))
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights, scores, logits = self.router(tokens)
        places, offsets = ops.expert_places(chosen, self.router.experts)
        out = self.experts(ops.dispatch_rows(tokens, places), offsets)
        combined = ops.combine_rows(out, weights, places)
        if torch.is_grad_enabled():
            balance = self.router.balance(offsets.diff(prepend=offsets.new_zeros(1)), scores, logits)
            if not recomputing():
                self.balance = balance
        if self.shared is not None:
            shared = self.shared(tokens)
            combined = combined + (
                shared if self.shared_gate is None else ops.sigmoid(self.shared_gate(tokens)) * shared
            )
        return combined.view(x.shape)

    def experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts on rows sorted by expert."""
        gate_up = self.product(rows, self.gate_up, self.gate_up_lora, offsets)
        return self.product(ops.swiglu(gate_up), self.down, self.down_lora, offsets)

    def product(self, rows: Tensor, weight: Tensor, adapter: Any, offsets: Tensor) -> Tensor:
        """Each row times its expert's weight, with what an adapter that is there and active adds to it."""
        (rows,) = lowered(rows)
        out = self.base_product(rows, weight, offsets)
        return out if adapter is None or not adapter.active else out + adapter(rows, offsets)

    def base_product(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """The experts' own part; whoever computes it in another way, as fp8 does, replaces this."""
        rows, weight = lowered(rows, weight)
        return ops.grouped_linear(rows, weight, offsets)

    def update_bias(self, rate: float, tokens_per_expert: Tensor | None = None) -> None:
        """Move the router's bias by one step, from the loads given or else those of the last forward.

        A step that is made of several forwards, or of several processes, gives their sum.
        """
        if tokens_per_expert is None:
            if self.balance is None:
                raise ValueError("there is no load to balance by yet; run a forward first, or give tokens_per_expert")
            tokens_per_expert = self.balance.tokens_per_expert
        self.router.update_bias(tokens_per_expert, rate)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are of the layer, not of what its last forward did."""
        return vars(self) | {"balance": None}

    def extra_repr(self) -> str:
        return f"{self.gate_up.shape[0]} experts of {self.gate_up.shape[2]}x{self.down.shape[2]}"


def recomputing() -> bool:
    """Whether this forward runs inside a backward, where activation checkpointing repeats it.

    Nobody waits for the balance of a repetition, and keeping it would keep the activations that are to be let go.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
