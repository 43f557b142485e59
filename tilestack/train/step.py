"""What a step computes: its micro-batches one after another, then an update. Nothing is waited for.

    begin(number)                 what the host decides for this step: learning rates, the weight of the average
    micro_batch(batch, first)     forward and backward; gradients, losses and counts add up
    update()                      gradients divided and clipped, the verdict on them, optimizer, average; the figures

All of the host's say lies in tensors that `begin` fills, and what goes on from step to step lies in tensors that stay where
they are. So the very same calls can be captured as CUDA graphs and replayed (static_step.py).
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from tilestack import optim
from tilestack.optim.exact_scale import divide_exactly_
from tilestack.optim.multi_tensor import KeptTables, MultiTensor
from tilestack.parallel.placement import Placement
from tilestack.train import execution
from tilestack.train.balancing import Balancing
from tilestack.train.objective import Objective
from tilestack.train.optimizers import AveragedWeights, rate_share, set_rates
from tilestack.train.recipe import Recipe

WEIGHT = "weight of "  # with a metric's name after it, among the sums: what that metric is a sum over


class Steps(Protocol):
    """What the loop asks for: a `Step`, or one that runs it in another way."""

    def begin(self, number: int) -> float:
        """Prepare the step of this number, the first being 0; its learning rate as a share of the highest."""

    def micro_batch(self, batch: Any, first: bool) -> int:
        """Add up a micro-batch; how many tokens went through the model."""

    def update(self) -> Tensor:
        """Finish the step; its figures, in the order of `Step.names`."""

    def release(self) -> bool:
        """Between two steps, give back the memory that is kept for the next one; whether there was any."""


class Step:
    def __init__(
        self,
        recipe: Recipe,
        runner: Any,
        objective: Objective,
        placement: Placement,
        optimizer: Any,
        balancing: Balancing,
        average: AveragedWeights | None,
        device: torch.device,
    ):
        self.recipe, self.runner, self.objective, self.device = recipe, runner, objective, device
        self.placement, self.parameters = placement, list(placement.parameters.values())
        self.optimizer, self.balancing, self.average = optimizer, balancing, average
        # A single micro-batch is divided by its tokens before its backward; more of them, here or on other processes, by all.
        self.one_batch = recipe.data.accumulate == 1 and placement.mesh.size("replicas") == 1
        self.compiled_graphs = execution.uses_graphs(recipe.run.compile, device)
        for param in self.parameters if self.compiled_graphs else ():
            param.grad = torch.zeros_like(param)  # in memory of its own, which no replay of a graph writes over
        self.clip_tables = KeptTables("clip_grad_norm_")
        self.weight_codes = kept_codes(recipe, runner)
        self.broken = torch.zeros((), device=device)  # bad steps so far; from one too many on nothing is updated
        self.names: list[str] = []  # of the figures
        self.forget()

    def forget(self) -> None:
        """Drop what a step that was not finished has added up."""
        self.count: Tensor | None = None
        self.batches = 0  # micro-batches so far
        self.sums: dict[str, Tensor] = {}
        self.balancing.loads = None
        self.drop_codes()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.compiled_graphs)
        self.placement.drop_gradients()

    def drop_codes(self) -> None:
        """Keep no codes of weights beyond the micro-batches of a step, whether they ended or broke off."""
        if self.weight_codes is not None:
            self.weight_codes.end()

    def begin(self, number: int) -> float:
        share = rate_share(self.recipe.schedule, number, self.recipe.run.steps)
        set_rates(self.optimizer, share)
        if self.average:
            self.average.begin(number)
        return share

    def micro_batch(self, batch: Any, first: bool) -> int:
        if self.compiled_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if first and self.weight_codes is not None:
            self.weight_codes.begin()
        with execution.autocast(self.recipe.precision, self.device):
            loss = self.objective.loss(self.runner, batch)
        valid = loss.count if isinstance(loss.count, Tensor) else torch.full((), loss.count, device=self.device)
        total = loss.total + self.balancing.loss() * valid
        self.batches = 1 if first else self.batches + 1
        self.placement.start_backward(last=self.batches == self.recipe.data.accumulate)
        (total / valid.clamp(min=1) if self.one_batch else total).backward()
        weights = {f"{WEIGHT}{name}": weight for name, weight in loss.weights.items()}
        added = {"loss": loss.total, **loss.metrics, **weights}
        if first or self.count is None:
            self.count = valid.detach().to(torch.float32, copy=True)
            self.sums = {name: value.detach().to(torch.float32, copy=True) for name, value in added.items()}
        else:
            self.count.add_(valid)
            for name, value in added.items():
                self.sums[name].add_(value.detach().float())
        return loss.tokens

    def update(self) -> Tensor:
        assert self.count is not None
        self.drop_codes()
        self._sum_over_processes()
        count = self.count.clamp(min=1)
        over = lambda name: self.sums[f"{WEIGHT}{name}"].clamp(min=1) if f"{WEIGHT}{name}" in self.sums else count
        figures = {name: value / over(name) for name, value in self.sums.items() if not name.startswith(WEIGHT)}
        if not self.one_batch:
            divide_exactly_([param.grad for param in self.parameters if param.grad is not None], count)
        figures["grad_norm"] = self._clip()
        skip = self._is_broken(figures)
        figures |= self.balancing.finish_step(skip)
        self._step_unless(skip)
        if self.average:
            self.average.update()
        self.names = list(figures)
        return torch.stack([value.float() for value in figures.values()])

    def _sum_over_processes(self) -> None:
        """Let gradients, losses, counts and loads be those of all processes."""
        mesh = self.placement.mesh
        if mesh.world == 1:
            return
        assert self.count is not None
        self.placement.finish_backward()
        sums = torch.stack([self.count, *self.sums.values()])
        mesh.sum(sums, "replicas")
        self.count, self.sums = sums[0], dict(zip(self.sums, sums[1:], strict=True))
        for load in self.balancing.loads or ():
            mesh.sum(load, "replicas")

    def _clip(self) -> Tensor:
        """The norm of the gradients, which are scaled down where the recipe bounds it."""
        if self.placement.divided:
            return self.placement.clip(self.recipe.optimizer.clip)
        if self.recipe.optimizer.clip:
            return optim.clip_grad_norm_(self.parameters, self.recipe.optimizer.clip, tables=self.clip_tables)
        grads = [param.grad for param in self.parameters if param.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))

    def _is_broken(self, figures: dict[str, Tensor]) -> Tensor:
        """Whether nothing is to be updated: a figure of this step is not finite, or those of more steps than may be skipped."""
        bad = ~(torch.isfinite(figures["loss"]) & torch.isfinite(figures["grad_norm"]))
        self.broken.add_(bad)
        return bad | (self.broken > self.recipe.run.skip_broken)

    def _step_unless(self, skip: Tensor) -> None:
        if isinstance(self.optimizer, MultiTensor):
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skip.item():  # torch's own optimizers cannot skip on the device
            self.optimizer.step()
        self._drop_gradients()

    def release(self) -> bool:
        return False


def kept_codes(recipe: Recipe, runner: Any) -> Any:
    """What keeps the fp8 codes of a model's weights for a step (fp8_weights.py), where some are asked for more than once."""
    again = recipe.data.accumulate > 1 or recipe.run.activation_checkpointing
    return getattr(runner, "weight_codes", None) if again and recipe.run.compile == "off" else None
