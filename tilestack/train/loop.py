"""The loop: batches in, updates out, for any objective. It resumes by itself, to the bit.

The host waits for the device only every `log_every` steps, and where it saves or evaluates. Losses and gradient norms
stay on the device until then. So does the verdict on them: after a loss or gradient that is not finite every further
update is skipped on the device, so that when the host hears of it the weights are still those the step began with.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tilestack.device import pick_device
from tilestack.garbage import startup_frozen
from tilestack.nn.lora import lora_parameters
from tilestack.parallel import environment
from tilestack.parallel.placement import Placement
from tilestack.parallel.sequence import SequenceParallel
from tilestack.train import checkpoint, execution, metrics
from tilestack.train.balancing import Balancing
from tilestack.train.checkpoint import save_broken_step
from tilestack.train.errors import TrainingError
from tilestack.train.metrics import Progress
from tilestack.train.objective import Objective
from tilestack.train.optimizers import AveragedWeights, make_optimizer
from tilestack.train.pipeline_step import PipelineStep
from tilestack.train.recipe import Recipe
from tilestack.train.run.folder import RunFolder
from tilestack.train.run.interruption import Interruption
from tilestack.train.run.profile import StepProfiler
from tilestack.train.run.provenance import begin, changes
from tilestack.train.static_step import choose_steps, not_captured
from tilestack.train.step import Step, Steps
from tilestack.train.whole_state import WholeState

T = TypeVar("T")


@dataclass
class Pending:
    """A step whose figures are still on the device, with its batches in case they prove to be bad."""

    step: int
    names: list[str]  # of the figures
    figures: Tensor  # [names]
    rate: float
    batches: list[Any]

    def figure(self, name: str) -> Tensor:
        return self.figures[self.names.index(name)]


@dataclass(frozen=True)
class Position:
    """Where a run stands beside its weights: its random states, and its place in the data."""

    chance: checkpoint.RandomState
    objective: dict[str, Any]


class Trainer:
    """Trains a model in a folder, from the last checkpoint there if there is one of the same run."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        objective: Objective,
        folder: RunFolder | Path | str,
        *,
        placement: Placement | None = None,
        provenance: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        after_evaluation: Callable[[], Any] = lambda: None,
        profile: int = 0,
    ):
        """`placement` says what of the model this process has, where it is one of several: they train as one, and the first
        of them writes. `profile` is how many steps to write a trace of."""
        self.recipe, self.model, self.objective = recipe, model, objective
        self.place = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.folder, self.provenance, self.profile = self.place.path, provenance or {}, profile
        metrics.load_trackers(recipe.run.trackers)
        self.device = pick_device(recipe.run.device, "run.device")
        seed_all(recipe.run.seed)
        settings = recipe.checkpoint
        self.checkpoints = checkpoint.Checkpoints(self.place.checkpoints, settings.keep, settings.asynchronous)
        if self.checkpoints.steps():
            changes(self.folder, recipe)
        self.runner = execution.prepare(model, recipe, self.device)
        self.placement = placement or Placement(model)
        self.found_model = found_model(self.placement, getattr(objective, "has_reference", False))
        self.mesh, learned = self.placement.mesh, self.placement.parameters
        if place := self.mesh.index("replicas"):
            torch.manual_seed(recipe.run.seed + place)  # what is dropped at random, in texts of its own
        if self.mesh.size("context") > 1:
            self.runner = SequenceParallel(self.runner, self.mesh.group("context"), recipe.parallel.context_by)
        self.optimizer = make_optimizer(model, recipe.optimizer, recipe.precision, recipe.run.seed, learned)
        self.balancing = Balancing(model, recipe.model)
        self.average = AveragedWeights(learned, recipe.ema.decay) if recipe.ema.decay else None
        self.whole = WholeState(self.placement, self.optimizer, self.average)
        self.progress, self.after_evaluation = progress or Progress(recipe), after_evaluation
        parts = self.optimizer, self.balancing, self.average, self.device
        one_step = PipelineStep if self.mesh.size("pipeline") > 1 else Step
        self.one_step = one_step(recipe, self.runner, objective, self.placement, *parts)
        self.steps: Steps
        self.steps, self.about_steps = choose_steps(self.one_step, self.progress.say)
        self.step = 0  # steps done
        self.clock, self.tokens = time.perf_counter(), 0  # since the speed was last told
        self.pending: list[Pending] = []
        self.skipped = 0  # bad steps that the host knows of
        self.updating = False  # whether weights and optimizer are between two steps
        self.saved = 0  # the step of the last checkpoint
        self.interruption = Interruption(self.progress.say, among=environment.launched())
        self.latest: dict[str, float] = {}
        self.trackers: list[metrics.Tracker] = []

    def run(self) -> dict[str, float]:
        """Train to the end, or until interrupted; the last figures by name. However it ends, what was done is saved."""
        careful = execution.deterministic(self.recipe.run.deterministic)
        held = self.place.held() if self.mesh.first else nullcontext()
        with held, self.interruption, careful, self.progress, startup_frozen(self.device):
            last = self._begin() if self.mesh.first else 0
            last = self.mesh.largest(last)
            log = lambda name: metrics.Log(self.folder / name) if self.mesh.first else metrics.NoLog()
            self.log, self.speed = log(metrics.METRICS), log(metrics.SPEED)
            try:
                if last:
                    self._resume(self.checkpoints.load(last))
                else:
                    self.log.cut(0)
                    self.speed.cut(0)
                if not self.finished:
                    if self.about_steps:
                        self.progress.say(self.about_steps)
                    about = self.recipe.run.name, self.recipe.table()
                    names = self.recipe.run.trackers if self.mesh.first else ()
                    self.trackers = metrics.open_trackers(names, self.folder, *about, self.step)
                self.model.train()
                self.clock, self.tokens = time.perf_counter(), 0
                wanted = self.profile and self.mesh.first
                profiler = StepProfiler(self.folder, self.profile, self.progress.say) if wanted else None
                with profiler or nullcontext():
                    self._train(profiler)
            finally:
                self.log.close()
                self.speed.close()
                for tracker in self.trackers:
                    tracker.close()
                self.checkpoints.wait()
        return self.latest

    def _begin(self) -> int:
        """Write the papers of the run; the step of its last checkpoint, 0 where there is none."""
        self.checkpoints.clean()
        steps = self.checkpoints.steps()
        if not steps or steps[-1] < self.recipe.run.steps:  # the papers of a finished run say how it was made
            papers = dict(self.provenance)
            if self.mesh.world > 1:
                papers["processes"] = dataclasses.asdict(self.mesh.layout) | {"shard": self.placement.shard}
            if counts := {name: count for name, count in getattr(self.objective, "counts", {}).items() if count}:
                papers["data"] = counts
                self.progress.say(", ".join(f"{count:,} {name}" for name, count in counts.items()))
            begin(self.folder, self.recipe, bool(steps), papers)
        return steps[-1] if steps else 0

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.run.steps

    @property
    def interrupted(self) -> int:
        """The signal that asked the run to stop; 0 where none did."""
        return self.interruption.number

    def _train(self, profiler: StepProfiler | None) -> None:
        """The steps that are left. A run that fails between two updates is saved as it was at the last one."""
        if self.step == 0 and self.recipe.evaluation.at_start:
            self._evaluate(evaluates=True, samples=False)
            self.clock = time.perf_counter()
        while not (self.finished or self._asked_to_stop()):
            # One of several processes cannot tell where the others are, nor save without them.
            start, step = self._position() if self.mesh.world == 1 else None, self.step
            try:
                self.train_step()
                if profiler:
                    profiler.finish_step(self.step)
                self._look_around()
            except (TrainingError, checkpoint.CheckpointError):
                raise
            except Exception:
                if start is not None and not self.updating and self.saved < self.step:
                    self._read_figures()
                    self._save(start if self.step == step else self._position())
                raise
        if self.saved < self.step:
            self._read_figures()
            self._save(self._position())

    def _asked_to_stop(self) -> bool:
        """Whether a signal has asked any process to stop: then all of them do, after the same step."""
        if asked := self.mesh.largest(self.interruption.number):  # else a signal may have come in between
            self.interruption.number = asked
        return asked > 0

    def train_step(self) -> None:
        """One step: its micro-batches, their gradients, an update. Nothing is waited for."""
        rate = self.steps.begin(self.step) * self.recipe.optimizer.lr
        batches: list[Any] = []
        try:
            for number in range(self.recipe.data.accumulate):
                batches.append(self.objective.next_batch())
                self.tokens += self.steps.micro_batch(batches[-1], first=number == 0)
        except BaseException:
            self.one_step.drop_codes()
            raise
        self.updating = True
        figures = self.steps.update()
        self.pending.append(Pending(self.step + 1, self.one_step.names, figures, rate, batches))
        self.step += 1
        self.updating = False

    def _look_around(self) -> None:
        """After a step: log, evaluate, sample and save what is due."""
        due = lambda every: bool(every) and self.step % every == 0
        settings, last = self.recipe.evaluation, self.finished
        evaluates, samples = due(settings.every) or last, due(settings.sample_every) or last
        saves = due(self.recipe.checkpoint.every) or last
        if due(self.recipe.run.log_every) or evaluates or samples or saves:
            self._read_figures()
            self.checkpoints.look()
        if evaluates or samples:
            self._evaluate(evaluates, samples)
        if saves:
            self._save(self._position())
        if evaluates or samples or saves:
            self.clock, self.tokens = time.perf_counter(), 0  # the speed is that of steps

    def _evaluate(self, evaluates: bool, samples: bool) -> None:
        figures, texts = self._with_room(lambda: self._look_at_model(evaluates, samples))
        if evaluates:
            self._write({"step": self.step, **figures})
        for text in texts:
            self.log.write(step=self.step, sample=text)
            self.progress.show_sample(self.step, text)
        self.log.flush()
        self.after_evaluation()

    def _look_at_model(self, evaluates: bool, samples: bool) -> tuple[dict[str, float], list[str]]:
        with self.as_evaluated():
            figures = self.objective.evaluate(self.model) if evaluates else {}
            return figures, self.objective.sample(self.model) if samples else []

    def _with_room(self, look: Callable[[], T]) -> T:
        """What a look at the model finds. CUDA graphs keep the memory of a step to themselves: where that is what the look
        lacks, and nobody insists on them, they go."""
        try:
            return look()
        except torch.OutOfMemoryError:
            if self.recipe.run.graph == "on" or not self.steps.release():
                raise
        self.progress.say(not_captured("an evaluation ran out of memory beside them"))
        return look()

    def _read_figures(self) -> None:
        """Fetch the figures of all pending steps at once, and write them down."""
        if not self.pending:
            return
        table = torch.stack([pending.figures for pending in self.pending]).tolist()
        for pending, values in zip(self.pending, table, strict=True):
            row = {"step": pending.step, **dict(zip(pending.names, values, strict=True)), "lr": pending.rate}
            self._write(row)
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                self._stop_or_skip(pending, row)
        self.pending.clear()
        rate = self.tokens * self.mesh.size("replicas") / (time.perf_counter() - self.clock)
        self.progress.update(self.step, self.latest, rate)
        self.speed.write(step=self.step, tokens_per_s=rate, **self.progress.machine_figures())
        self.clock, self.tokens = time.perf_counter(), 0

    def _write(self, row: dict[str, Any]) -> None:
        self.log.write(**row)
        self.latest |= {name: value for name, value in row.items() if name != "step"}
        figures = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.write(row["step"], figures)

    def _stop_or_skip(self, pending: Pending, row: dict[str, Any]) -> None:
        """Keep the step that broke: its batch where it may be skipped, else the model before it too, and stop."""
        self.log.flush()
        self.skipped += 1
        folder, most = self.folder / f"broken-step-{pending.step:06d}", self.recipe.run.skip_broken
        stops = self.skipped > most
        weights = self.whole.weights(self.model.state_dict()) if stops else {}
        optimizer = self.whole.optimizer_state() if stops else {"state": {}, "param_groups": []}
        if self.mesh.first:
            save_broken_step(folder, pending.batches, weights, optimizer, row)
        elif self.mesh.index("tensor") == self.mesh.index("pipeline") == 0:  # what the others read is kept beside it
            beside = folder.with_name(f"{folder.name}-rank-{self.mesh.rank}")
            save_broken_step(beside, pending.batches, {}, {"state": {}, "param_groups": []}, row)
        self.mesh.wait_for_all()  # all of it is on the disk before any process ends
        wrong = "loss" if not math.isfinite(row["loss"]) else "grad_norm"
        what = f"step {pending.step} has a {wrong.replace('_', ' ')} of {row[wrong]}"
        if not stops:
            self.progress.say(f"{what}; passed over, {self.skipped} of at most {most}. Its batch is in {folder}")
            return
        raise TrainingError(
            f"{what}; stopped. Its batch, and the weights and optimizer before it, are in {folder}. The same command goes on "
            f"from step {self.saved} with --set run.skip_broken={self.skipped} to pass over it, or with a lower optimizer.lr"
        )

    def _position(self) -> Position:
        return Position(checkpoint.RandomState.taken(), self.objective.state_dict())

    def _save(self, position: Position) -> None:
        states, values = checkpoint.pack_optimizer(self.whole.optimizer_state())
        random_tensors, random_values = position.chance.packed()
        for name, mine in list(random_tensors.items()):
            others = self.mesh.from_every_rank(mine)[1:]
            random_tensors |= {f"{name}.{rank}": state for rank, state in enumerate(others, 1)}
        tensors = {"weights": self.whole.weights(learned_state(self.model)), "optimizer": states, "rng": random_tensors}
        if loads := self.balancing.state_dict():
            tensors["loads"] = self.whole.weights(loads)
        if self.average:
            tensors["average"] = self.whole.averages()
        state = {
            "step": self.step, "optimizer": values, "rng": random_values, "objective": position.objective,
            "lengths": [self.log.flush(), self.speed.flush()], "skipped": self.skipped, "found_model": self.found_model,
            "latest": {name: metrics.finite(value) for name, value in self.latest.items()},
        }  # fmt: skip
        if self.mesh.first:
            self.checkpoints.save(self.step, tensors, state, copies=self.placement.divided)
        self.saved = self.step

    def _resume(self, saved: checkpoint.Saved) -> None:
        # Earlier versions say nothing of it.
        if saved.state.get("found_model", self.found_model) != self.found_model:
            raise checkpoint.CheckpointError(
                f"model.path = {self.recipe.model.path!r} is not the model that the run in {self.folder} began with; put that "
                "back, or start over (--fresh)"
            )
        checkpoint.refuse_other_shapes(saved, "weights", self.whole.shaped(learned_state(self.model)))
        self.whole.load_weights(saved.tensors["weights"])
        states = checkpoint.unpack_optimizer(saved.tensors.get("optimizer", {}), saved.state["optimizer"])
        self.whole.load_optimizer(states)
        self.balancing.load_state_dict(saved.tensors.get("loads", {}))
        if self.average:
            checkpoint.refuse_other_shapes(saved, "average", self.whole.shaped(self.average.state_dict()))
            self.whole.load_averages(saved.tensors["average"])
        self.objective.load_state_dict(saved.state["objective"])
        self.step, self.latest, self.skipped = (saved.state[name] for name in ("step", "latest", "skipped"))
        self.saved = self.step
        self.one_step.broken.fill_(self.skipped)
        for log, length in zip((self.log, self.speed), saved.state["lengths"], strict=True):
            log.cut(length)
        of_rank = lambda name: f"{name}.{self.mesh.rank}" if self.mesh.rank else name
        states_of = {
            name: x for name in ("torch", "cuda") if (x := saved.tensors["rng"].get(of_rank(name))) is not None
        }
        if "torch" in states_of:  # a process that was not there before goes on with chances of its own
            checkpoint.RandomState.unpacked(states_of, saved.state["rng"]).restore()
        self.progress.resumed(self.step)

    @contextmanager
    def as_evaluated(self) -> Iterator[None]:
        """Inside, the model is the one to judge or keep: averaged where the recipe says so, in eval mode, without
        gradients; what is drawn at random inside leaves the run as it was."""
        chance = checkpoint.RandomState.taken()
        self.model.eval()
        try:
            averaged = self.average.applied() if self.average else nullcontext()
            with torch.no_grad(), execution.autocast(self.recipe.precision, self.device), averaged:
                yield
                self.placement.reshard()  # before the weights are those of the run again
        finally:
            self.model.train()
            chance.restore()


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """What of a model a run changes and has to save: all of it, or the adapters alone where there are some."""
    state = model.state_dict()
    return {name: state[name] for name, _ in lora_parameters(model)} or state


def found_model(placement: Placement, has_reference: bool) -> str:
    """A checksum of the model as the run finds it, which must be the same when it goes on: beside adapters, and where it is
    compared with. Empty where all that matters is in the checkpoint."""
    adapters = {name for name, _ in lora_parameters(placement.model)}
    if not (adapters or has_reference):
        return ""
    return checkpoint.checksum((name, x) for name, x in placement.whole_state() if name not in adapters)


def seed_all(seed: int) -> None:
    """Let every source of chance begin with the run's seed: an objective may draw from any."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
