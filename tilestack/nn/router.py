"""Routing: which experts a token goes to, with what weights, and how evenly that loads them.

Shapes: T tokens, H hidden, E experts, K experts of each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import full_precision
from tilestack.ops.numerics import wide
from tilestack.ops.routing import SCORINGS

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Balance:
    """How one forward loaded the experts, and the losses that even it out; both are means over tokens.

    `auxiliary_loss` is E times the sum over experts of (share of tokens that chose it) x (its mean probability): K when
    all are loaded alike. `z_loss` is the mean square of logsumexp(logits), which keeps logits small.
    """

    tokens_per_expert: Tensor  # [E], integers
    auxiliary_loss: Tensor
    z_loss: Tensor

    @property
    def imbalance(self) -> Tensor:
        """The load of the busiest expert over the mean load: 1 is even, E / K the worst."""
        return imbalance(self.tokens_per_expert)


def imbalance(tokens_per_expert: Tensor) -> Tensor:
    load = tokens_per_expert.float()
    return load.max() / load.mean().clamp(min=torch.finfo(load.dtype).tiny)


class LoadWindow:
    """The loads of the last steps together. An expert with no token in all of them is dead, one in a single step is not.

    They are rows of one tensor that stays in its place, the newest last, so that a CUDA graph can go on adding to it.
    """

    def __init__(self, steps: int = 100):
        self.steps = steps
        self.loads: Tensor | None = None  # [steps, E], zeros before the first

    def add(self, tokens_per_expert: Tensor) -> None:
        if self.loads is None:
            self.loads = tokens_per_expert.new_zeros(self.steps, len(tokens_per_expert))
        self.loads.copy_(self.loads.roll(-1, 0))
        self.loads[-1].copy_(tokens_per_expert.detach())

    def total(self) -> Tensor:
        if self.loads is None:
            raise ValueError("there are no loads yet; add tokens_per_expert of a step first")
        return self.loads.sum(0)

    def imbalance(self) -> Tensor:
        return imbalance(self.total())

    def dead(self) -> Tensor:
        """How many experts had no token."""
        return (self.total() == 0).sum()


class Router(torch.nn.Module):
    """Scores every expert for every token and chooses the best K of them.

    Scores are the softmax of the logits, or their sigmoid. With groups, as in DeepSeek's models, experts lie in groups
    of neighbours and only those of the best `top_groups` can be chosen; a group is as good as its best expert (softmax)
    or its two best (sigmoid). The weights are the chosen scores: made to add up to one (`normalise`), times `scale`. A
    bias, where there is one, has a say in the choice and none in the weights. All of this is done in float32, and kept in
    it whatever the dtype of the model around: a router is small, and casting it would be part of every forward.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        if scoring not in SCORINGS:
            raise ValueError(f"scoring must be {' or '.join(SCORINGS)}, not {scoring!r}")
        if groups < 1 or experts % groups:
            raise ValueError(f"groups must divide the {experts} experts, but there are {groups}")
        if not 1 <= top_groups <= groups:
            raise ValueError(f"top_groups must be between 1 and {groups}, the number of groups, not {top_groups}")
        if not 1 <= top_k <= top_groups * (experts // groups):
            raise ValueError(
                f"top_k must be between 1 and {top_groups * (experts // groups)}, the experts to choose from, not {top_k}"
            )
        self.experts, self.top_k, self.scoring, self.normalise, self.scale = experts, top_k, scoring, normalise, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = torch.nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("bias", torch.zeros(experts) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(chosen experts [T, K], their weights [T, K], all scores [T, E], logits [T, E]) for tokens [T, H]."""
        with full_precision(x.device.type):
            logits = ops.linear(wide(x), wide(self.weight))
            chosen, weights, scores = ops.route(
                logits, self.bias, self.top_k, self.scoring, self.normalise, self.scale, self.groups, self.top_groups
            )
            return chosen, weights, scores, logits

    def balance(self, tokens_per_expert: Tensor, scores: Tensor, logits: Tensor) -> Balance:
        tokens = max(scores.shape[0], 1)
        probabilities = scores if self.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        auxiliary = (tokens_per_expert / tokens * (probabilities.sum(0) / tokens)).sum() * self.experts
        return Balance(tokens_per_expert, auxiliary, ops.logsumexp(logits).square().sum() / tokens)

    @torch.no_grad()
    def update_bias(self, tokens_per_expert: Tensor, rate: float) -> None:
        """A step of balancing without a loss: experts above the mean load become less likely to be chosen, others more."""
        if self.bias is None:
            raise ValueError("this router has no bias to balance with; make it with bias=True")
        load = tokens_per_expert.float()
        self.bias += rate * torch.sign(load.mean() - load)

    def _apply(self, fn, recurse=True):
        """Weight and bias move with the module and keep their float32: the steps a bias grows by are lost in half precision."""

        def moved(x: Tensor) -> Tensor:
            made = fn(x)
            return wide(x).to(made.device) if made.dtype in HALVES else made

        return super()._apply(moved, recurse)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} to {self.top_k} of {self.experts}, {self.scoring}"
