"""A step whose micro-batches go through pipeline stages: they are collected, and run together when the last of them is there."""

from typing import Any

import torch

from tilestack.data import Batch
from tilestack.parallel.pipeline import Pipeline
from tilestack.train import execution
from tilestack.train.recipe import Recipe
from tilestack.train.step import Step


class PipelineStep(Step):
    """A step of next-token prediction, the objective of pretraining; every process is given all micro-batches."""

    def __init__(self, recipe: Recipe, runner: Any, *others: Any):
        super().__init__(recipe, runner, *others)
        self.one_batch = False  # gradients are those of the sum
        data = recipe.data
        self.pipeline = Pipeline(
            runner,
            rows=data.batch,
            tokens=data.sequence,
            micro_batches=data.accumulate,
            schedule=recipe.parallel.schedule,
            autocast=lambda: execution.autocast(recipe.precision, self.device),
        )
        self.waiting: list[Batch] = []

    def micro_batch(self, batch: Batch, first: bool) -> int:
        self.waiting = [batch] if first else [*self.waiting, batch]
        if len(self.waiting) == self.recipe.data.accumulate:
            self.placement.start_backward(last=True, times=len(self.waiting))
            losses = self.pipeline.step(self.waiting)
            self.count = torch.stack([batch.valid for batch in self.waiting]).sum().float()
            self.sums = {"loss": losses.float().sum()}
            self.waiting = []
        return batch.ids.numel()
