"""A run's figures in the programs that people watch them with: TensorBoard, wandb and trackio, where a recipe names them.

Each is told what `metrics.jsonl` is told. A run that is continued goes on under the id it began with, which run.json keeps.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
PROJECT = "tilestack"


class Tracker(Protocol):
    def write(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard's events, from a step on: what an earlier attempt wrote after it is hidden."""

    def __init__(self, module: Any, folder: Path, step: int):
        self.writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Logged:
    """A run of wandb, or of trackio, which has wandb's words."""

    def __init__(self, run: Any):
        self.run = run

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


def load_trackers(names: Sequence[str]) -> dict[str, Any]:
    """The packages of trackers; a missing one is said with the command that installs it."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module(MODULES[name])
        except ImportError as missing:
            raise ImportError(f"run.trackers needs {name}: pip install {name}") from missing
    return found


def open_trackers(names: Sequence[str], folder: Path, name: str, recipe: Mapping[str, Any], step: int) -> list[Tracker]:
    """Trackers that go on after a step; `name` and `recipe` are what they show of the run."""
    opened: list[Tracker] = []
    for kind, module in load_trackers(names).items():
        about = dict(project=PROJECT, config=dict(recipe), resume="allow")
        if kind == "tensorboard":
            opened.append(TensorBoard(module, folder, step))
        elif kind == "wandb":
            run = module.init(id=run_id(folder), name=name, dir=str(folder.absolute()), **about)
            opened.append(Logged(run))
        else:
            opened.append(Logged(module.init(name=f"{name}-{run_id(folder)}", **about)))
    return opened


def run_id(folder: Path) -> str:
    """The same for every start of one run, and another for a run that starts over."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))[0]["id"]
