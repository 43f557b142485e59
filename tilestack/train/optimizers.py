"""How gradients become updates: the optimizer of a recipe, its learning rate over the run, and the average of the weights.

Matrices inside the network are decayed, and Muon may step them. Embeddings, the output head, norms, biases and routers
are not decayed and belong to AdamW (`optim.muon.is_hidden_matrix`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilestack import optim
from tilestack.contract.backends import AUTO, chosen
from tilestack.models.decoder import Decoder
from tilestack.models.weights import rows_of_matrices
from tilestack.optim.adam_8bit import MIN_8BIT_SIZE
from tilestack.optim.dynamic_map import BLOCK
from tilestack.optim.muon import is_hidden_matrix
from tilestack.train.recipe import Optimizer, Precision, Schedule

STEP_BYTES = 4  # of the number of steps that Adam keeps beside each parameter


def make_optimizer(
    model: nn.Module,
    settings: Optimizer,
    precision: Precision,
    seed: int,
    parameters: Mapping[str, Tensor] | None = None,
) -> Any:
    """One optimizer for every parameter that learns; `parameters` are these, where they are not the model's own but what a
    process has of them (parallel/placement.py). Each group keeps its highest rate as `initial_lr`; its rate is a tensor
    beside its parameters, which `set_rates` fills, so that a CUDA graph reads it anew in every replay."""
    given = model.named_parameters() if parameters is None else parameters.items()
    named = [(name, param) for name, param in given if param.requires_grad]
    if not named:
        raise ValueError("no parameter of the model requires a gradient; there is nothing to train")
    hidden, others = ([param for _, param in kind] for kind in hidden_and_others(named))
    decay = settings.weight_decay
    if settings.name == "muon":
        made: Any = muon(named, model, settings, precision)
    elif settings.name == "sgd":
        made = optim.SGD(groups(hidden, others, decay), lr=settings.lr, momentum=settings.momentum)
    else:
        made = adamw(groups(hidden, others, decay), settings, precision, seed)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=group["params"][0].device)
    return made


def hidden_and_others(named: Iterable[tuple[str, Tensor]]) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Parameters in the order in which an optimizer numbers them: its first group, then its second."""
    kinds: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]] = [], []
    for name, param in named:
        kinds[not is_hidden_matrix(name, param)].append((name, param))
    return kinds


def groups(decayed: Sequence[Tensor], others: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    return [
        dict(params=params, weight_decay=weight)
        for params, weight in ((decayed, decay), (others, 0.0))
        if params
    ]  # fmt: skip


def muon(
    named: Sequence[tuple[str, Tensor]], model: nn.Module, settings: Optimizer, precision: Precision
) -> optim.Muon:
    """Muon for hidden matrices, those of a decoder's fused projections apart, and AdamW for the rest."""
    rows = rows_of_matrices(model.config) if isinstance(model, Decoder) else {}
    return optim.Muon(
        named,
        lr=settings.muon_lr,
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        adjust_lr_fn=settings.muon_rule,
        adamw=dict(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0),
        splits={name: rows_here(rows[name], param) for name, param in named if name in rows},
        ns_dtype=torch.bfloat16 if named[0][1].is_cuda else torch.float32,  # which a CPU multiplies faster
        master_weights=precision.parameters == "bfloat16",
    )


def rows_here(rows: list[int], param: Tensor) -> list[int]:
    """Of the matrices in a parameter those that are here: of a stack, a process may have some experts, which are all alike."""
    there = param[..., 0].numel() if param.ndim == 3 else sum(rows)
    return rows[: len(rows) * there // sum(rows)]


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
        group["lr"].fill_(group["initial_lr"] * share)


def load_states(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give an optimizer the saved states of its parameters; rates and the like stay as the recipe says them now."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)


class AveragedWeights:
    """The exponential moving average of parameters, in float32: often a better model than the last step's. Early
    steps weigh more than `decay` says, so that the start is forgotten."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float):
        self.decay = decay
        self.parameters = {name: param for name, param in parameters.items() if param.requires_grad}
        self.averages = {name: param.detach().float().clone() for name, param in self.parameters.items()}
        self.share = torch.zeros((), device=next(iter(self.averages.values())).device)  # of the next step's weights

    def begin(self, step: int) -> None:
        """Prepare for the update after a step, the first being 0."""
        self.share.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the parameters, as far as `begin` said."""
        averages = list(self.averages.values())
        apart = torch._foreach_sub([param.detach().float() for param in self.parameters.values()], averages)
        torch._foreach_mul_(apart, self.share)
        torch._foreach_add_(averages, apart)

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


def state_bytes(name: str, param: Tensor, settings: Optimizer, precision: Precision) -> int:
    """What the optimizer of a recipe keeps of one parameter, by its name, once it has taken a step."""
    half = precision.parameters == "bfloat16"
    master = half and precision.updates == "master"
    size = param.numel()
    moment = size * (2 if half and not master else 4)
    copy = 4 * size if master else 0
    if settings.name == "sgd":
        return moment if settings.momentum else 0
    if settings.name == "muon" and is_hidden_matrix(name, param):
        return moment + copy
    if settings.name == "adamw8bit" and size >= MIN_8BIT_SIZE:
        moment = size + 4 * -(-size // BLOCK)
    return STEP_BYTES + 2 * moment + copy
