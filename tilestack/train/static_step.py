"""A step over buffers that stay in place, captured as CUDA graphs: a thousand launches become two.

Small models are bound by the host that launches their kernels. Once the first steps have compiled and settled everything,

    first     the first micro-batch: gradients are made
    more      any other micro-batch: gradients are added to
    update    division, clipping, the verdict, optimizer, average, figures

are each captured, and every later step copies its batches into the buffer and replays them: first, more as often as there
are further micro-batches, update. They share their memory, since they always run in this order. What the host decides comes
in tensors (step.py), and the figures are copied out, as the next replay may write over them.

Captured or not, the arithmetic is that of `Step`, so a run may resume in another way than it began. Without a GPU the same
calls run over the same buffer, one kernel at a time.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tilestack.optim.multi_tensor import MultiTensor, takes_kernels
from tilestack.train.batch_buffer import difference, fill, map_tensors, no_buffer_for
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError
from tilestack.train.step import Step, Steps

WARM_UP = 3  # steps before the capture: kernels compile, operators settle on their plans, states come to be
HOOKS = (  # where modules and parameters keep what is to be called on the way
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def why_not_static(recipe: Recipe, objective: Any, optimizer: Any, device: torch.device) -> str:
    """Why the steps of a run cannot be captured whole; empty where they can."""
    if not getattr(objective, "fixed_shapes", False):
        return f"batches of {type(objective).__name__} differ in shape"
    if recipe.run.compile != "off":
        return f'run.compile = "{recipe.run.compile}" has ways of its own'
    if recipe.parallel.pipeline > 1:
        return "the micro-batches of parallel.pipeline run together"
    if device.type != "cuda":
        return ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "torch.distributed is in use, and what processes tell each other has not been tried in graphs"
    if recipe.run.activation_checkpointing:
        return "run.activation_checkpointing looks at random states on the host"
    if not isinstance(optimizer, MultiTensor) or not takes_kernels(optimizer.name, device):
        return "the optimizer runs without kernels, and waits for the device"
    return ""


def why_not_by_default(recipe: Recipe, model: Any, objective: Any, optimizer: Any, device: torch.device) -> str:
    """Why `run.graph = "auto"` lets a run take its steps kernel by kernel; empty where it captures them. The decision is made
    here and nowhere else: what `on` may capture and `auto` shall leave alone is a rule more."""
    if device.type != "cuda":
        return f"the run is on a {device.type.upper()}"
    if reason := why_not_static(recipe, objective, optimizer, device):
        return reason
    name = hooked(model)
    return f"{name} has a hook, which a replay would not call" if name else ""


def hooked(model: Any) -> str:
    """The first module or parameter with a hook of someone's, by its name; empty where none has one."""
    for name, part in chain(model.named_modules(), model.named_parameters()):
        if any(getattr(part, kind, None) for kind in HOOKS):
            return name or type(part).__name__
    return ""


def choose_steps(step: Step, say: Callable[[str], Any]) -> tuple[Steps, str]:
    """A step as `run.graph` wants it run, and what there is to say about it: why `auto` captures nothing."""
    recipe, wanted = step.recipe, step.recipe.run.graph
    if wanted == "off":
        return step, ""
    if wanted == "auto":
        reason = why_not_by_default(recipe, step.runner, step.objective, step.optimizer, step.device)
        return (step, not_captured(reason)) if reason else (StaticStep(step, say=say), "")
    if reason := why_not_static(recipe, step.objective, step.optimizer, step.device):
        raise RecipeError(cannot_be_on(reason))
    return StaticStep(step, must=True, say=say), ""


def not_captured(reason: str) -> str:
    return f"steps are not captured in CUDA graphs: {reason}"


def cannot_be_on(reason: str) -> str:
    return f'run.graph = "on" cannot be: {reason}; set it to "auto" or "off"'


class StaticStep:
    """Runs a step over one buffer for batches; on CUDA from the fourth step on as graphs. Where a capture fails, or the
    host would wait inside a step, it goes on without graphs and says why, unless they `must` be."""

    def __init__(self, step: Step, must: bool = False, say: Callable[[str], Any] = print):
        self.step, self.must, self.say = step, must, say
        self.batch: Any = None  # the buffer
        self.tokens = self.done = 0  # tokens of a micro-batch, steps that are finished
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.figures: Tensor | None = None  # where the graphs leave them
        self.buffers = True  # whether batches go through the buffer
        self.given_up = step.device.type != "cuda"
        self.stream = None if self.given_up else torch.cuda.Stream(step.device)
        self.pool = None if self.given_up else torch.cuda.graph_pool_handle()  # memory that the graphs share

    def begin(self, number: int) -> float:
        return self.step.begin(number)

    def micro_batch(self, batch: Any, first: bool) -> int:
        if self.buffers:
            self._put(batch, first)
        if first and self.done == WARM_UP and not (self.graphs or self.given_up):
            self._capture_all()
        if graph := self.graphs.get("first" if first else "more"):
            graph.replay()
        else:
            with self._beside(), self._watched():
                self.tokens = self.step.micro_batch(self.batch if self.buffers else batch, first)
        return self.tokens

    def _put(self, batch: Any, first: bool) -> None:
        """Copy a batch into the buffer. One that does not keep the promise of `fixed_shapes` ends the graphs; nothing else
        is wrong with it, unless the gradients of its step are in them already."""
        reason = no_buffer_for(batch) if self.batch is None else difference(self.batch, batch)
        if reason:
            reason += f", though {type(self.step.objective).__name__} has fixed_shapes"
            if self.graphs and not first:
                raise ValueError(f'{reason}; set run.graph to "off"')
            self.release()
            self._give_up(reason)
        elif self.batch is None:
            self.batch = map_tensors(batch, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        else:
            fill(self.batch, batch)

    def update(self) -> Tensor:
        if graph := self.graphs.get("update"):
            graph.replay()
            assert self.figures is not None
            return self.figures.clone()
        with self._beside(), self._watched():
            figures = self.step.update()
        self.done += 1
        return figures

    def release(self) -> bool:
        """Give back the memory that the graphs keep, and go on without them; whether there were any."""
        had = bool(self.graphs)
        if had:
            self._drop_graphs()
            self._leave_graphs()
        return had

    def _capture_all(self) -> None:
        """Capture the parts of a step; none of them runs yet."""
        here = torch.cuda.current_stream()
        try:
            self._capture("first", lambda: self.step.micro_batch(self.batch, True))
            if self.step.recipe.data.accumulate > 1:
                self._capture("more", lambda: self.step.micro_batch(self.batch, False))
            self.figures = self._capture("update", self.step.update)
            return
        except Exception as problem:
            self._drop_graphs()
            clear_up_after_capture(here, self.pool)
            reason = f"{type(problem).__name__}, {str(problem).partition(chr(10))[0]}"
            if self.must:
                raise RecipeError(cannot_be_on(reason)) from problem
        self._give_up(reason)  # here, where the problem and all that it holds of the capture's memory are gone

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        self.figures = None
        self.step.forget()

    def _capture(self, name: str, call: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = call()
        self.graphs[name] = graph
        return result

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Inside, work is queued on the stream of the captures, by which autograd knows the gradients."""
        if self.given_up or self.stream is None:
            yield
            return
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            yield
        here.wait_stream(self.stream)

    def _watched(self) -> Any:
        """In the last step before the capture: give up where the host waits for the device, which no graph can."""
        return self._without_waiting() if self.done == WARM_UP - 1 and not self.given_up else nullcontext()

    @contextmanager
    def _without_waiting(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        for warning in caught:
            if warning not in waits and "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if waits:
            self._give_up(f"{waits[0].filename}:{waits[0].lineno} waits for the device")

    def _give_up(self, reason: str) -> None:
        if self.must:
            raise RecipeError(cannot_be_on(reason))
        self._leave_graphs()
        self.say(not_captured(reason))

    def _leave_graphs(self) -> None:
        self.given_up, self.buffers, self.batch = True, False, None
        torch.cuda.empty_cache()  # which holds a step's memory for a stream, or for graphs, that are not used any more


def clear_up_after_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what a capture that failed leaves behind: its stream as the current one, allocations that go to its pool, that
    pool as one in use, and chance as if it were under way."""
    torch.cuda.set_stream(stream)
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # where it got as far as its end
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
