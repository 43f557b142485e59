"""What someone at the terminal sees of a run: a bar with loss, speed, memory and time left, or plain lines in a file."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tilestack.train.recipe import Recipe

SHOWN = {  # the figures of a step that tell how it goes, by their names in metrics.jsonl, and what they are called here
    "loss": "loss",
    "validation_loss": "validation",
    "reward": "reward",
    "validation_reward": "validation reward",
    "margin": "margin",
}


class Progress:
    """Shows a run while it lasts. `flops` are those of a token, forward and backward, and `peak` the GPU's rate, for the
    share of it that training uses (MFU)."""

    def __init__(self, recipe: Recipe, console: Console | None = None, flops: float = 0.0, peak: float = 0.0):
        self.console = console or Console(stderr=True)
        self.steps, self.flops, self.peak, self.rate = recipe.run.steps, flops, peak, 0.0
        self.done = 0
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        if self.console.is_terminal:
            self.bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(recipe.run.name, total=self.steps, figures="")

    def __enter__(self) -> "Progress":
        self.began, self.first = time.perf_counter(), self.done
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar:
            self.bar.stop()

    def resumed(self, step: int) -> None:
        self.done = self.first = step
        self.print(f"resuming after step {step}")
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step)

    def update(self, step: int, figures: Mapping[str, Any], rate: float) -> None:
        self.done, self.rate = step, rate
        shown = self.figures(figures)
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step, figures=shown)
        else:
            seconds = (time.perf_counter() - self.began) / max(1, step - self.first) * (self.steps - step)
            self.print(f"step {step}/{self.steps}  {shown}  {seconds:.0f} s left", highlight=False)

    def figures(self, figures: Mapping[str, Any]) -> str:
        parts = [f"{words} {float(figures[name]):.4f}" for name, words in SHOWN.items() if name in figures]
        if self.rate:
            parts.append(f"{self.rate:,.0f} tokens/s")
        machine = self.machine_figures()
        if "mfu" in machine:
            parts.append(f"MFU {100 * machine['mfu']:.1f}%")
        if "memory_gib" in machine:
            parts.append(f"{machine['memory_gib']:.1f} GiB")
        return "  ".join(parts)

    def machine_figures(self) -> dict[str, float]:
        """The share of the GPU's arithmetic that went into the model, and the most memory it has held."""
        if not torch.cuda.is_available():
            return {}
        found = {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
        if self.flops and self.peak:
            found["mfu"] = self.rate * self.flops / self.peak
        return found

    def print(self, words: str, **how: Any) -> None:
        """Show words to whoever watches. Where nobody does any more, since a pipe or terminal was closed, a run goes on in
        silence; rich would end the program there."""
        with suppress(OSError, SystemExit):
            self.console.print(words, **how)

    def say(self, words: str) -> None:
        self.print(escape(words), highlight=False, soft_wrap=True)

    def show_sample(self, step: int, text: str) -> None:
        self.print(f"[dim]sample at step {step}:[/dim] {escape(text)}", highlight=False)
