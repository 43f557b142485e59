"""The loop: batches in, updates out, for any objective. It resumes by itself, to the bit.

The host waits for the device only every `log_every` steps, and where it saves or evaluates. Losses and gradient norms
stay on the device until then. So does the verdict on them: after a loss or gradient that is not finite every further
update is skipped on the device, so that when the host hears of it the weights are still those the step began with.
"""

import fcntl
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilestack import optim
from tilestack.device import pick_device
from tilestack.nn.lora import lora_parameters
from tilestack.optim.multi_tensor import MultiTensor
from tilestack.train import checkpoint, execution, metrics
from tilestack.train.balancing import Balancing
from tilestack.train.checkpoint import save_broken_step
from tilestack.train.metrics import Progress
from tilestack.train.objective import Objective
from tilestack.train.optimizers import AveragedWeights, make_optimizer, rate_share, set_rates
from tilestack.train.recipe import Recipe
from tilestack.train.run.provenance import begin


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says at which step and what was saved."""


@dataclass
class Pending:
    """A step whose figures are still on the device, with its batches in case they prove to be bad."""

    step: int
    figures: dict[str, Tensor]
    rate: float
    batches: list[Any]


class Trainer:
    """Trains a model in a folder, from the last checkpoint there if there is one of the same recipe."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        objective: Objective,
        folder: Path | str,
        *,
        provenance: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        after_evaluation: Callable[[], Any] = lambda: None,
    ):
        self.recipe, self.model, self.objective, self.folder = recipe, model, objective, Path(folder)
        self.device = pick_device(recipe.run.device, "run.device")
        torch.manual_seed(recipe.run.seed)
        self.checkpoints = checkpoint.Checkpoints(self.folder / "checkpoints", recipe.checkpoint.keep)
        begin(self.folder, recipe, bool(self.checkpoints.steps()), provenance or {})
        self.runner = execution.prepare(model, recipe, self.device)
        self.parameters = [param for param in model.parameters() if param.requires_grad]
        self.graphs = execution.uses_graphs(recipe.run.compile, self.device)
        for param in self.parameters if self.graphs else ():
            param.grad = torch.zeros_like(param)  # in memory of its own, which no replay of a graph writes over
        self.optimizer = make_optimizer(model, recipe.optimizer, recipe.precision, recipe.run.seed)
        self.balancing = Balancing(model, recipe.model)
        self.average = AveragedWeights(model, recipe.ema.decay) if recipe.ema.decay else None
        self.progress, self.after_evaluation = progress or Progress(recipe), after_evaluation
        self.step = 0  # steps done
        self.clock, self.tokens = time.perf_counter(), 0  # since the speed was last told
        self.pending: list[Pending] = []
        self.broken = torch.zeros((), device=self.device)  # 1 from the first bad step on
        self.interrupted = False
        self.latest: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Train to the end, or until interrupted; the last figures by name."""
        careful = execution.deterministic(self.recipe.run.deterministic)
        with self._only_one(), self._interruptible(), careful, self.progress:
            self.log = metrics.Log(self.folder / metrics.METRICS)
            self.speed = metrics.Log(self.folder / metrics.SPEED)
            self.checkpoints.clean()
            if steps := self.checkpoints.steps():
                self._resume(self.checkpoints.load(steps[-1]))
            else:
                self.log.cut(0)
                self.speed.cut(0)
            self.board = metrics.TensorBoard(self.folder, self.step) if self.recipe.run.tensorboard else None
            self.model.train()
            self.clock, self.tokens = time.perf_counter(), 0
            try:
                while self.step < self.recipe.run.steps and not self.interrupted:
                    self.train_step()
                    self._look_around()
            finally:
                self.log.close()
                self.speed.close()
                if self.board:
                    self.board.close()
        return self.latest

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.run.steps

    def train_step(self) -> None:
        """One step: its micro-batches, their gradients, an update. Nothing is waited for."""
        rate = rate_share(self.recipe.schedule, self.step, self.recipe.run.steps)
        set_rates(self.optimizer, rate)
        accumulate = self.recipe.data.accumulate
        batches, sums, count = [], dict[str, Tensor](), torch.zeros((), device=self.device)
        for _ in range(accumulate):
            batch = self.objective.next_batch()
            batches.append(batch)
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with execution.autocast(self.recipe.precision, self.device):
                loss = self.objective.loss(self.runner, batch)
            valid = loss.count if isinstance(loss.count, Tensor) else count.new_full((), loss.count)
            total = loss.total + self.balancing.loss() * valid
            (total / valid.clamp(min=1) if accumulate == 1 else total).backward()
            count += valid
            self.tokens += loss.tokens
            for name, value in {"loss": loss.total, **loss.metrics}.items():
                sums[name] = sums.get(name, 0) + value.detach().float()
        figures = {name: value / count.clamp(min=1) for name, value in sums.items()}
        if accumulate > 1:
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], count.clamp(min=1))
        figures["grad_norm"] = self._clip()
        figures |= self.balancing.finish_step()
        self._update(figures)
        self.pending.append(Pending(self.step + 1, figures, rate * self.recipe.optimizer.lr, batches))
        self.step += 1

    def _clip(self) -> Tensor:
        """The norm of the gradients, which are scaled down where the recipe bounds it."""
        if self.recipe.optimizer.clip:
            return optim.clip_grad_norm_(self.parameters, self.recipe.optimizer.clip)
        grads = [param.grad for param in self.parameters if param.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))

    def _update(self, figures: dict[str, Tensor]) -> None:
        """Step the optimizer, unless this step or one before it has a figure that is not finite."""
        finite = torch.isfinite(figures["loss"]) & torch.isfinite(figures["grad_norm"])
        self.broken = torch.maximum(self.broken, (~finite).float())
        if isinstance(self.optimizer, MultiTensor):
            self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not self.broken.item():  # torch's own optimizers cannot skip on the device
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.graphs)
        if self.average:
            self.average.update(self.step)

    def _look_around(self) -> None:
        """After a step: log, evaluate, sample and save what is due."""
        due = lambda every: bool(every) and self.step % every == 0
        settings, last = self.recipe.evaluation, self.finished
        evaluates, samples = due(settings.every) or last, due(settings.sample_every) or last
        saves = due(self.recipe.checkpoint.every) or last or self.interrupted
        if due(self.recipe.run.log_every) or evaluates or samples or saves:
            self._read_figures()
        if evaluates or samples:
            with self.as_evaluated():
                if evaluates:
                    self._write({"step": self.step, **self.objective.evaluate(self.model)})
                for text in self.objective.sample(self.model) if samples else ():
                    self.log.write(step=self.step, sample=text)
                    self.progress.show_sample(self.step, text)
            self.log.flush()
            self.after_evaluation()
        if saves:
            self._save()
        if evaluates or samples or saves:
            self.clock, self.tokens = time.perf_counter(), 0  # the speed is that of steps

    def _read_figures(self) -> None:
        """Fetch the figures of all pending steps at once, and write them down."""
        if not self.pending:
            return
        names = list(self.pending[0].figures)
        table = torch.stack([torch.stack([p.figures[name].float() for name in names]) for p in self.pending]).tolist()
        for pending, values in zip(self.pending, table, strict=True):
            row = {"step": pending.step, **dict(zip(names, values, strict=True)), "lr": pending.rate}
            self._write(row)
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                self._stop_at(pending, row)
        self.pending.clear()
        seconds = time.perf_counter() - self.clock
        self.progress.update(self.step, self.latest, self.tokens / seconds)
        self.speed.write(step=self.step, tokens_per_s=self.tokens / seconds, **self.progress.machine_figures())
        self.clock, self.tokens = time.perf_counter(), 0

    def _write(self, row: dict[str, Any]) -> None:
        self.log.write(**row)
        self.latest |= {name: value for name, value in row.items() if name != "step"}
        if self.board:
            self.board.write(row)

    def _stop_at(self, pending: Pending, row: dict[str, Any]) -> None:
        """Save the step that broke, with the model and optimizer as they were before it, and stop."""
        self.log.flush()
        folder = self.folder / f"broken-step-{pending.step:06d}"
        save_broken_step(folder, pending.batches, self.model.state_dict(), self.optimizer.state_dict(), row)
        wrong = "loss" if not math.isfinite(row["loss"]) else "grad_norm"
        raise TrainingError(
            f"step {pending.step} has a {wrong.replace('_', ' ')} of {row[wrong]}; stopped. Its batch, and the weights "
            f"and optimizer before it, are in {folder}; a lower optimizer.lr or a longer schedule.warmup may help"
        )

    def _save(self) -> None:
        states, values = checkpoint.pack_optimizer(self.optimizer.state_dict())
        random_tensors, random_values = checkpoint.random_state()
        tensors = {"weights": learned_state(self.model), "optimizer": states, "rng": random_tensors}
        if loads := self.balancing.state_dict():
            tensors["loads"] = loads
        if self.average:
            tensors["average"] = self.average.state_dict()
        state = {
            "step": self.step, "optimizer": values, "rng": random_values, "objective": self.objective.state_dict(),
            "lengths": [self.log.flush(), self.speed.flush()], "latest": {n: metrics.finite(v) for n, v in self.latest.items()},
        }  # fmt: skip
        self.checkpoints.save(self.step, tensors, state)

    def _resume(self, saved: checkpoint.Saved) -> None:
        checkpoint.refuse_other_shapes(saved, "weights", learned_state(self.model))
        self.model.load_state_dict(saved.tensors["weights"], strict=False)
        self.optimizer.load_state_dict(
            checkpoint.unpack_optimizer(saved.tensors.get("optimizer", {}), saved.state["optimizer"])
        )
        self.balancing.load_state_dict(saved.tensors.get("loads", {}))
        if self.average:
            checkpoint.refuse_other_shapes(saved, "average", self.average.state_dict())
            self.average.load_state_dict(saved.tensors["average"])
        self.objective.load_state_dict(saved.state["objective"])
        self.step, self.latest = saved.state["step"], saved.state["latest"]
        for log, length in zip((self.log, self.speed), saved.state["lengths"], strict=True):
            log.cut(length)
        checkpoint.restore_random_state(saved.tensors["rng"], saved.state["rng"])
        self.progress.resumed(self.step)

    @contextmanager
    def as_evaluated(self) -> Iterator[None]:
        """Inside, the model is the one to judge or keep: averaged where the recipe says so, in eval mode, without
        gradients; what is drawn at random inside leaves the run as it was."""
        random_tensors, random_values = checkpoint.random_state()
        self.model.eval()
        try:
            with torch.no_grad(), execution.autocast(self.recipe.precision, self.device):
                if self.average:
                    with self.average.applied():
                        yield
                else:
                    yield
        finally:
            self.model.train()
            checkpoint.restore_random_state(random_tensors, random_values)

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Keep other processes out of the folder."""
        with open(self.folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(f"another process is training in {self.folder}") from None
            yield

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Finish the step and save when asked to stop; a second time stops at once."""

        def stop(number: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        try:
            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """What of a model a run changes and has to save: all of it, or the adapters alone where there are some."""
    state = model.state_dict()
    return {name: state[name] for name, _ in lora_parameters(model)} or state


def start_over(folder: Path) -> None:
    """Remove a run's checkpoints and metrics, so that it starts from nothing."""
    for path in (folder / "checkpoints", *folder.glob("broken-step-*")):
        shutil.rmtree(path, ignore_errors=True)
    for name in (metrics.METRICS, metrics.SPEED):
        (folder / name).unlink(missing_ok=True)
