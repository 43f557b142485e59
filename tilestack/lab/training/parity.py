"""Loss parity: a model trained on other implementations of its operators must follow the same curve.

Two runs from the same weights over the same batches, one on the definitions, one on a backend under test. They cannot agree
to the bit, and rounding grows as steps follow each other; so how far may they part? As far as the definitions part from
themselves when every weight starts one unit in the last place off, up or down at random, in the precision the run computes
in. Such runs are equally right. From a few of them follows, at each step, the largest difference seen so far. The bound is
four times that: twice, because an implementation's error may be twice the definition's (docs/proof.md), and twice again,
because a few runs underestimate the largest; and never less than the loss itself is rounded to.

A run in fp8 is held against one in the recipe's own precision in the same way. There a unit in the last place is one of
e4m3, an eighth, and only the weights that fp8 rounds, the matrices of hidden layers, start off by it.

Where a rate is so high that equally right runs end apart, one run of each says little about which is better: what it shows
is mostly chance. So both can be trained from several starts, the weights as they are and nudged, and how far apart they end
on average is given with its standard error.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilestack import backend, models, ops, optim
from tilestack.lab.training.loss_curves import mean_of_last_tenth
from tilestack.train import execution
from tilestack.train.execution import layers_of
from tilestack.train.fp8 import compute_in_fp8
from tilestack.train.optimizers import make_optimizer, rate_share, set_rates
from tilestack.train.pretrain import Pretraining
from tilestack.train.recipe import Recipe

NUDGED_RUNS = 3
FACTOR = 4.0
ALWAYS_TORCH = "torch"


@dataclass(frozen=True)
class Parity:
    """The loss of each step of two runs, on the definitions and on the backend, and how far apart they may be."""

    name: str
    reference: list[float]
    candidate: list[float]
    bound: list[float]
    against: str = "the definitions"
    ends: list[tuple[float, float]] = field(default_factory=list)  # of each start, where the two end

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.reference, self.candidate, strict=True)]

    @property
    def broken_at(self) -> int | None:
        """The first step, counted from 1, that is out of bound; None when the curves agree. NaN never agrees."""
        pairs = zip(self.differences, self.bound, strict=True)
        return next((step for step, (apart, bound) in enumerate(pairs, 1) if not apart <= bound), None)

    @property
    def worst(self) -> float:
        """The largest share of the bound that a difference takes."""
        return max(apart / bound for apart, bound in zip(self.differences, self.bound, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"broken_at": self.broken_at, "worst": self.worst}


def chosen_backend(name: str, swap: Sequence[str]) -> AbstractContextManager[None]:
    """The definitions, except for some operators, or for all that the backend has."""
    listed = {operator.name: operator for operator in ops.operators()}
    having = [op for op, operator in listed.items() if name in operator.implementations]
    if lacking := [operator for operator in swap if operator in listed and operator not in having]:
        raise ValueError(f"{', '.join(lacking)} has no {name} backend; these have: {', '.join(having)}")
    if not having:
        there = sorted({found for operator in listed.values() for found in operator.implementations})
        raise ValueError(f"no operator has a {name} backend; there are {', '.join(there)}")
    optimizer = ["adamw", "clip_grad_norm"] if name == "triton" and not swap else []
    return backend(ALWAYS_TORCH, **dict.fromkeys([*(swap or having), *optimizer], name))


def parity(
    recipe: Recipe,
    build: Callable[[], Any],
    objective: Pretraining,
    steps: int,
    name: str = "triton",
    swap: Sequence[str] = (),
    say: Callable[[str], Any] = lambda words: None,
) -> Parity:
    """Train the model that `build` makes on both, over the objective's next batches."""
    ulp = torch.finfo(execution.DTYPES[recipe.precision.compute]).eps
    reference = Way("the definitions", lambda: backend(ALWAYS_TORCH))
    candidate = Way(f"{', '.join(swap) or 'every operator'} on {name}", lambda: chosen_backend(name, swap))
    return compare_curves(recipe, build, objective, steps, reference, candidate, ulp, lambda key: True, say)


def fp8_parity(
    recipe: Recipe,
    build: Callable[[], Any],
    objective: Pretraining,
    steps: int,
    starts: int = 1,
    say: Callable[[str], Any] = lambda words: None,
) -> Parity:
    """The same in the recipe's precision and in fp8, on whatever backends `auto` takes. Beside the weights as they are, both
    are trained from `starts - 1` that are nudged."""
    if recipe.precision.fp8:
        raise ValueError("fp8 is held against a recipe without it; set precision.fp8 = false")
    model = build()
    hidden = {f"layers.{name}" for name, weight in layers_of(model).named_parameters() if weight.ndim > 1}
    reference, candidate = Way(recipe.precision.compute, nullcontext), Way("fp8", nullcontext, compute_in_fp8)
    ulp = torch.finfo(torch.float8_e4m3fn).eps
    return compare_curves(recipe, build, objective, steps, reference, candidate, ulp, hidden.__contains__, say, starts)


@dataclass(frozen=True)
class Way:
    """One of two ways to train: in words, on which backends, and with what change to a model that is ready to train."""

    words: str
    choice: Callable[[], AbstractContextManager[None]]
    change: Callable[[Any], None] = lambda model: None


def compare_curves(
    recipe: Recipe, build: Callable[[], Any], objective: Pretraining, steps: int, reference: Way, candidate: Way,
    ulp: float, nudges: Callable[[str], bool], say: Callable[[str], Any], starts: int = 1,
) -> Parity:  # fmt: skip
    """Train in both ways, and in that of the reference from weights that start off by a unit where `nudges` says so; in
    that of the candidate too where there are several starts."""
    nudged_runs = max(NUDGED_RUNS, starts - 1)
    batches = [objective.next_batch() for _ in range(steps)]
    start = {key: value.clone() for key, value in build().state_dict().items()}

    def run(way: Way, seed: int | None = None) -> list[float]:
        say(
            way.words
            + ("" if seed is None else f", nudged, {seed + 1} of {nudged_runs if way is reference else starts - 1}")
        )
        model = build()
        off = {} if seed is None else nudged_weights({key: x for key, x in start.items() if nudges(key)}, ulp, seed)
        model.load_state_dict(start | off)
        with way.choice():
            return train(recipe, model, objective, batches, objective.device, way.change)

    losses, ours = run(reference), run(candidate)
    near = [run(reference, seed) for seed in range(nudged_runs)]
    ours_near = [run(candidate, seed) for seed in range(starts - 1)]
    pairs = zip([losses, *near], [ours, *ours_near], strict=False)
    ends = [(mean_of_last_tenth(theirs), mean_of_last_tenth(mine)) for theirs, mine in pairs]
    return Parity(candidate.words, losses, ours, allowed_differences(losses, near[:NUDGED_RUNS]), reference.words, ends)


def allowed_differences(reference: Sequence[float], near: Sequence[Sequence[float]]) -> list[float]:
    """How far a step's loss may be from the reference, given runs that are equally right."""
    apart = [max(abs(run[step] - loss) for run in near) for step, loss in enumerate(reference)]
    least = [torch.finfo(torch.float32).eps * abs(loss) for loss in reference]
    return [FACTOR * max(seen, rounding) for seen, rounding in zip(accumulate(apart, max), least, strict=True)]


def nudged_weights(state: dict[str, Tensor], ulp: float, seed: int) -> dict[str, Tensor]:
    """Weights one unit in the last place larger or smaller, as chance has it."""
    source = torch.Generator().manual_seed(seed)
    sign = lambda tensor: (torch.randint(0, 2, tensor.shape, generator=source) * 2 - 1).to(tensor)
    return {key: x * (1 + ulp * sign(x)) if x.is_floating_point() else x for key, x in state.items()}


def train(
    recipe: Recipe, model: Any, objective: Pretraining, batches: Sequence[Any], device: torch.device,
    change: Callable[[Any], None],
) -> list[float]:  # fmt: skip
    """The loss of each step: the recipe's precision, optimizer, clipping and schedule, and nothing that looks away."""
    runner = execution.prepare(model, recipe, device)
    change(model)
    runner.train()
    optimizer = make_optimizer(model, recipe.optimizer, recipe.precision, recipe.run.seed)
    losses = []
    for step, batch in enumerate(batches):
        set_rates(optimizer, rate_share(recipe.schedule, step, recipe.run.steps))
        with execution.autocast(recipe.precision, device):
            loss = objective.loss(runner, batch)
        mean = loss.total / loss.count
        mean.backward()
        if recipe.optimizer.clip:
            optim.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.detach().float())
    return torch.stack(losses).tolist()


def new_model(recipe: Recipe, vocabulary: int) -> Any:
    torch.manual_seed(recipe.run.seed)
    return models.Decoder(models.ModelConfig.from_hf({"vocab_size": vocabulary, **recipe.model.config}, strict=True))
