"""How gradients become updates: the optimizer of a recipe, its learning rate over the run, and the average of the weights.

Matrices inside the network are decayed, and Muon may step them. Embeddings, the output head, norms, biases and routers
are not decayed and belong to AdamW: an embedding's rows are looked up rather than multiplied through, and a router's
few rows must not be made equally loud.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilestack import optim
from tilestack.contract.backends import AUTO, chosen
from tilestack.train.recipe import Optimizer, Precision, Schedule

OUTSIDE = ("embed", "head", "router")  # parts of the names of parameters that are no hidden matrices


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    return param.ndim >= 2 and not any(word in part for part in name.split(".") for word in OUTSIDE)


def make_optimizer(model: nn.Module, settings: Optimizer, precision: Precision, seed: int) -> Any:
    """One optimizer for every parameter that learns. Each group keeps its highest rate as `initial_lr`."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError("no parameter of the model requires a gradient; there is nothing to train")
    hidden = [param for name, param in named if is_hidden_matrix(name, param)]
    others = [param for name, param in named if not is_hidden_matrix(name, param)]
    decay = settings.weight_decay
    if settings.name == "muon":
        # torch's Muon takes matrices only: experts, stacked in three dimensions, stay with AdamW.
        matrices = [param for param in hidden if param.ndim == 2]
        stacked = [param for param in hidden if param.ndim > 2]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            momentum = settings.muon_momentum
            parts.append(torch.optim.Muon(matrices, lr=settings.muon_lr, momentum=momentum, weight_decay=decay))
        if rest := groups(stacked, others, decay):  # none where adapters alone are trained
            parts.append(adamw(rest, settings, precision, seed))
        made: Any = Routed(parts)
    elif settings.name == "sgd":
        made = optim.SGD(groups(hidden, others, decay), lr=settings.lr, momentum=settings.momentum)
    else:
        made = adamw(groups(hidden, others, decay), settings, precision, seed)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    return made


def groups(decayed: Sequence[Tensor], others: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    return [
        dict(params=params, weight_decay=weight)
        for params, weight in ((decayed, decay), (others, 0.0))
        if params
    ]  # fmt: skip


def adamw(params: list[dict[str, Any]], settings: Optimizer, precision: Precision, seed: int) -> torch.optim.AdamW:
    shared: dict[str, Any] = dict(lr=settings.lr, betas=settings.betas, eps=settings.eps)
    half = precision.parameters == "bfloat16"
    on_cpu = all(param.device.type == "cpu" for group in params for param in group["params"])
    if settings.name != "adamw8bit" and on_cpu and not half and chosen("adamw") == AUTO:
        return torch.optim.AdamW(params, fused=True, **shared)  # ours has no kernel there, PyTorch's has
    kind = optim.AdamW8bit if settings.name == "adamw8bit" else optim.AdamW
    return kind(
        params,
        stochastic_rounding=half and precision.updates == "stochastic",
        master_weights=half and precision.updates == "master",
        seed=seed,
        **shared,
    )


def rate_share(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of a step, the first being 0, as a share of the highest: a function of the step alone, so that a
    resumed run needs nothing saved to continue it."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, steps - schedule.warmup - 1)  # 0 after the warm-up, 1 at the last step
    progress = min(progress, 1.0)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        fallen = (1 - math.cos(math.pi * progress)) / 2
    elif schedule.name == "linear":
        fallen = progress
    else:  # warm-up, stable, decay
        fallen = max(0.0, 1 - (1 - progress) / schedule.decay)
    return 1 - (1 - schedule.final) * fallen


def set_rates(optimizer: Any, share: float) -> None:
    """Set every group's learning rate to a share of its highest."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def load_states(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give an optimizer the saved states of its parameters; rates and the like stay as the recipe says them now."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)


class Routed:
    """Several optimizers, each for parameters of its own, that act and are saved as one."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]):
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The state dicts in one: parameters are numbered on from part to part."""
        state, param_groups, first = {}, [], 0
        for part in self.parts:
            own = part.state_dict()
            state.update({first + number: values for number, values in own["state"].items()})
            param_groups += [group | {"params": [first + n for n in group["params"]]} for group in own["param_groups"]]
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": param_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        waiting, first = list(state_dict["param_groups"]), 0
        if len(waiting) != len(self.param_groups):
            raise ValueError(f"the saved optimizer has {len(waiting)} groups, this one {len(self.param_groups)}")
        for part in self.parts:
            own, waiting = waiting[: len(part.param_groups)], waiting[len(part.param_groups) :]
            numbers = [number for group in own for number in group["params"]]
            part.load_state_dict(
                {
                    "state": {n - first: state_dict["state"][n] for n in numbers if n in state_dict["state"]},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in own],
                }
            )
            first += len(numbers)


class AveragedWeights:
    """The exponential moving average of a model's parameters, in float32: often a better model than the last step's. Early
    steps weigh more than `decay` says, so that the start is forgotten."""

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
