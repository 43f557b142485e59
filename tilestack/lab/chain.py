"""From nothing to a model that answers, recipe by recipe, with the figures of each: pretrain, sft, dpo, grpo, chat.

Every stage is the command that people type, in a process of its own, and starts from the model that the last one left:

    tilestack train demo   →   tilestack sft sft   →   tilestack dpo dpo   →   tilestack grpo grpo   →   tilestack generate

What they come to is kept in `results/<machine>/recipes/chain.json`, from which the table in the documentation is made.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tilestack.data import corpora
from tilestack.lab import results
from tilestack.train import metrics

QUESTIONS = 3
SEED_OF_QUESTIONS = 2**31  # no recipe's

Run = Callable[[Sequence[str]], str]  # runs a command of tilestack, and gives what it printed


@dataclass(frozen=True)
class Stage:
    command: str
    recipe: str
    figures: tuple[str, ...]  # of those it logs, what it is judged by
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A stage that was run: each figure when it was first and last measured."""

    command: str
    recipe: str
    steps: int
    parameters: int
    seconds: float
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)


def stages(device: str) -> list[Stage]:
    """The recipes of the chain. They are for a model of their own, so what differs from one of the demo is set here: it has
    more to unlearn, and on a GPU, where it is larger, takes smaller steps; and a GPU takes the kernels that are fastest there.
    """
    longer = ("model.config={}", "run.steps=300", "schedule.name=cosine", "evaluation.every=100")
    on_gpu = lambda rate: ("run.backend=", f"optimizer.lr={rate}") if device == "cuda" else ()
    return [
        Stage("train", "demo-gpu" if device == "cuda" else "demo", ("validation_loss", "bits_per_byte")),
        Stage("sft", "sft", ("validation_loss", "exact_answers"), (*longer, *on_gpu("1e-3"))),
        Stage("dpo", "dpo", ("validation_loss", "validation_accuracy"), on_gpu("1e-4")),
        Stage("grpo", "grpo", ("validation_reward",), on_gpu("1e-4")),
    ]


def arguments(stage: Stage, folder: Path, start: Path | None) -> list[str]:
    """The command of a stage, which begins with the model in `start`."""
    settings = [*stage.settings, *([f"model.path={start}"] if start else [])]
    changes = [word for setting in settings for word in ("--set", setting)]
    return [stage.command, stage.recipe, "--folder", str(folder), "--fresh", *changes]


def run_chain(device: str, folder: Path, run: Run, say: Callable[[str], Any]) -> dict[str, Any]:
    """Run every stage in a folder of its own, then ask the last model; the figures and answers as JSON can hold them."""
    finished: list[Finished] = []
    start: Path | None = None
    for stage in stages(device):
        place = folder / stage.command
        command = arguments(stage, place, start)
        say("tilestack " + " ".join(command))
        began = time.perf_counter()
        run(command)
        finished.append(what_came_of(stage, place, time.perf_counter() - began))
        say(in_words(finished[-1]))
        start = place / "model"
    answers = []
    for task in corpora.arithmetic(QUESTIONS, SEED_OF_QUESTIONS, difficulty=2, kinds=["larger"]):
        answer = run(["generate", task.prompt, "--model", str(start), "--max-tokens", "24"]).strip()
        answers.append({"prompt": task.prompt, "answer": answer, "right": bool(corpora.reward(task, answer))})
        say(f"{task.prompt}  {answer}")
    return {"stages": [asdict(stage) for stage in finished], "answers": answers}


def what_came_of(stage: Stage, folder: Path, seconds: float) -> Finished:
    curves = {name: metrics.curve(folder, name)[1] for name in stage.figures}
    figures = {name: (values[0], values[-1]) for name, values in curves.items() if values}
    return Finished(stage.command, stage.recipe, metrics.curve(folder, "loss")[0][-1], weights_in(folder / "model"), seconds, figures)  # fmt: skip


def weights_in(folder: Path) -> int:
    """How many weights the files of a model hold."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, which is no dict
                size = 1
                for side in file.get_slice(name).get_shape():
                    size *= side
                count += size
    return count


def in_words(stage: Finished) -> str:
    figures = ", ".join(f"{name.replace('_', ' ')} {shown(pair)}" for name, pair in stage.figures.items())
    return f"{stage.command} {stage.recipe}: {stage.steps:,} steps in {stage.seconds:.0f} s; {figures}"


def shown(pair: Sequence[float]) -> str:
    """A figure from its first measurement to its last."""
    return f"{pair[0]:.3f} → {pair[1]:.3f}"


def path_of(folder: Path, slug: str) -> Path:
    """A level below the benchmark's files, which are of contests."""
    return folder / slug / "recipes" / "chain.json"


def save(folder: Path, machine: dict[str, Any], chain: dict[str, Any]) -> Path:
    path = path_of(folder, machine["slug"])
    results.save(path, {"machine": machine, **chain})
    return path


def run_tilestack(command: Sequence[str]) -> str:
    """Run a command of tilestack as people do; what it says on the way goes to the terminal. Raises where it fails."""
    done = subprocess.run([sys.executable, "-m", "tilestack", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"tilestack {command[0]} ended with {done.returncode}, and the chain with it")
    return done.stdout
