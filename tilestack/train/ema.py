"""An exponential moving average of the weights, in float32: often a better model than the last step's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The average of a model's parameters. Early steps weigh more than `decay` says, so that the start is forgotten."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.averages = {name: param.detach().float().clone() for name, param in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the parameters after a step, the first being 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        targets = [param.detach().float() for param in self.parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), targets, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages as its weights."""
        kept = {name: param.detach().clone() for name, param in self.parameters.items()}
        self._write(self.averages)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, param in self.parameters.items():
            param.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        return self.averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, average in self.averages.items():
            average.copy_(state[name])
