"""Mixtures of experts in training: the losses that even out their load, the biases that do so without a loss, and the
figures that show whether it works.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tilestack.nn.moe import MoE
from tilestack.nn.router import LoadWindow, imbalance
from tilestack.train.recipe import Model
from tilestack.train.settings import RecipeError


class Balancing:
    """Watches every mixture of experts in a model over the micro-batches of each step."""

    def __init__(self, model: nn.Module, settings: Model):
        self.settings = settings
        self.mixtures: list[Any] = [module for module in model.modules() if isinstance(module, MoE)]
        if settings.bias_rate and not any(mixture.router.bias is not None for mixture in self.mixtures):
            raise RecipeError(
                "model.bias_rate moves the biases of routers, and this model has no router with a bias; set it to 0 and "
                "balance by model.auxiliary_loss"
            )
        self.windows = [LoadWindow() for _ in self.mixtures]
        self.loads: list[Tensor] | None = None  # of the step so far, per mixture

    def loss(self) -> Tensor | float:
        """What the last forward's imbalance costs, for one token: the mean over the mixtures, so that the weights mean the
        same in models of any depth."""
        if not self.mixtures:
            return 0.0
        balances = [mixture.balance for mixture in self.mixtures]
        loads = [balance.tokens_per_expert for balance in balances]
        if self.loads is None:
            self.loads = [load.clone() for load in loads]
        else:
            for sum_so_far, load in zip(self.loads, loads, strict=True):
                sum_so_far.add_(load)
        weights = self.settings
        costs = [weights.auxiliary_loss * b.auxiliary_loss + weights.z_loss * b.z_loss for b in balances]
        return torch.stack(costs).mean()

    def finish_step(self, skip: Tensor) -> dict[str, Tensor]:
        """Move the biases of routers that have one, unless the step is skipped; the load of the busiest expert over the mean,
        in the worst layer, and how many experts of all layers had no token for a hundred steps."""
        if not self.loads:
            return {}
        for mixture, window, load in zip(self.mixtures, self.windows, self.loads, strict=True):
            window.add(load)
            if (bias := mixture.router.bias) is not None:
                before = bias.clone()
                mixture.update_bias(self.settings.bias_rate, load)
                bias.copy_(torch.where(skip, before, bias))
        figures = {
            "imbalance": torch.stack([imbalance(load) for load in self.loads]).max(),
            "dead_experts": torch.stack([window.dead() for window in self.windows]).sum(),
        }
        self.loads = None
        return figures

    def state_dict(self) -> dict[str, Tensor]:
        """The windows of loads, so that a resumed run counts the same dead experts."""
        return {f"{i}": window.loads for i, window in enumerate(self.windows) if window.loads is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for number, loads in state.items():
            for load in loads:
                self.windows[int(number)].add(load.to(self.mixtures[int(number)].gate_up.device))
