"""What a run optimises. The loop knows nothing of texts, answers or preferences: it asks an objective for batches and
their loss, and saves the objective's place in the data.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch as a sum, and over how many it is: a step divides the sum over all of its micro-batches
    by their whole count, so that accumulation equals one larger batch."""

    total: Tensor  # a sum, differentiable
    count: Tensor | int  # valid tokens or pairs; a tensor is never waited for
    metrics: dict[str, Tensor] = field(default_factory=dict)  # further sums, over the count or their weights; detached
    tokens: int = 0  # tokens that went through the model, for the speed
    weights: dict[str, Tensor] = field(default_factory=dict)  # what a metric is a sum over, where it is not the count


class Objective(Protocol):
    """Pretraining, SFT, DPO, GRPO: what a run optimises. One that reads data may count in `counts`, a dict, what it took and
    what it left out; a run says so and keeps it. One with `fixed_shapes` promises that batches differ in nothing but the
    contents of their tensors, and that `loss` does the same with each, so that a CUDA graph of one step is right for all:
    once steps are captured, it is called no more. One that `has_reference` compares with the model as the run found it."""

    def next_batch(self) -> Any:
        """The next micro-batch, on the device; advances the cursor."""

    def loss(self, model: nn.Module, batch: Any) -> Loss: ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data, by name; the model is in eval mode and without gradients."""

    def sample(self, model: nn.Module) -> list[str]:
        """Texts that show what the model does now, as it does it with the same weights every time."""

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as JSON can hold it."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
