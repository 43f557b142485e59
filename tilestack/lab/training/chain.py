"""Recipes one after another, with the figures of each.

Every stage is the command that people type, in a process of its own, and starts from the model that another one left. The
chain goes from nothing to a model that answers:

    tilestack train demo   →   tilestack sft sft   →   tilestack dpo dpo   →   tilestack grpo grpo   →   tilestack generate

The recipes of alignment, as they are, all start from the small model that sft makes:

    tilestack sft sft   →   tilestack grpo grpo, tilestack dpo dpo, the same with adapters, tilestack kto kto

What each came to is kept beside its folder, so that a chain that was stopped can go on with the stage it was at, and what
all came to in `results/<machine>/recipes/`, from which the tables in the documentation are made.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tilestack.data import corpora
from tilestack.lab import machine, results
from tilestack.lab.stale import source_of_run
from tilestack.train import metrics
from tilestack.train.run.folder import RunFolder

CHAIN, ALIGNMENT = "recipes/chain", "recipes/alignment"  # a level below the benchmark's files, which are of contests
QUESTIONS = 3
SEED_OF_QUESTIONS = 2**31  # no recipe's

Run = Callable[[Sequence[str]], str]  # runs a command of tilestack, and gives what it printed


@dataclass(frozen=True)
class Stage:
    command: str
    recipe: str
    figures: tuple[str, ...]  # of those it logs, what it is judged by
    settings: tuple[str, ...] = ()
    after: str = ""  # the command whose model it begins with; that of the stage before it where none is named


@dataclass(frozen=True)
class Finished:
    """A stage that was run: each figure when it was first and last measured."""

    command: str
    recipe: str
    settings: tuple[str, ...]
    steps: int
    parameters: int
    seconds: float
    processor_seconds: float  # which others on the machine change less
    commit: str
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)  # tokens_per_s, and mfu where it is known
    source: str = ""  # the hash of what it ran


def stages(device: str) -> list[Stage]:
    """The recipes of the chain. They are for a model of their own, so what differs from one of the demo is set here: it has
    more to unlearn, and on a GPU, where it is larger, takes smaller steps.
    """
    longer = ("model.config={}", "run.steps=300", "schedule.name=cosine", "evaluation.every=100")
    on_gpu = lambda rate: (f"optimizer.lr={rate}",) if device == "cuda" else ()
    return [
        Stage("train", "demo-gpu" if device == "cuda" else "demo", ("validation_loss", "bits_per_byte")),
        Stage("sft", "sft", ("validation_loss", "exact_answers"), (*longer, *on_gpu("1e-3"))),
        Stage("dpo", "dpo", ("validation_loss", "validation_accuracy"), on_gpu("1e-4")),
        Stage("grpo", "grpo", ("validation_reward",), on_gpu("1e-4")),
    ]


def alignment_stages() -> list[Stage]:
    """The recipes of alignment, each from the model of `recipes/sft.toml`."""
    judged = ("validation_loss", "validation_accuracy")
    return [
        Stage("sft", "sft", ("validation_loss", "exact_answers")),
        Stage("grpo", "grpo", ("validation_reward",), after="sft"),
        Stage("dpo", "dpo", judged, after="sft"),
        Stage("dpo", "dpo", judged, ("lora.rank=8", "optimizer.lr=3e-3"), after="sft"),
        Stage("kto", "kto", judged, after="sft"),
    ]


def arguments(stage: Stage, folder: Path, start: Path | None) -> list[str]:
    """The command of a stage, which begins with the model in `start`."""
    settings = [*stage.settings, *([f"model.path={start}"] if start else [])]
    changes = [word for setting in settings for word in ("--set", setting)]
    return [stage.command, stage.recipe, "--folder", str(folder), "--fresh", *changes]


def run_stages(
    stages: Sequence[Stage], folder: Path, run: Run, say: Callable[[str], Any], resume: bool = False
) -> tuple[list[Finished], Path]:
    """Run every stage in a folder of its own; what came of each, and where the last one's model is. To `resume` is to pass
    over the first stages that an earlier call finished with the same commands."""
    finished: list[Finished] = []
    models: dict[str, Path] = {}
    last = ""
    for number, stage in enumerate(stages, 1):
        place = folder / (f"{number}-{stage.command}" if stage.command in models else stage.command)
        command, kept = arguments(stage, place, models.get(stage.after or last)), place.with_suffix(".json")
        say("tilestack " + " ".join(command))
        before = finished_before(kept, command) if resume else None
        if before is None:
            resume = False  # what follows starts from another model than before
            kept.unlink(missing_ok=True)
            began, used = time.perf_counter(), processor_seconds_of_children()
            run(command)
            took = time.perf_counter() - began, processor_seconds_of_children() - used
            before = what_came_of(stage, place, *took)
            results.save(kept, {"command": command, "finished": asdict(before)})
        finished.append(before)
        say(stage_in_words(before))
        last, models[stage.command] = stage.command, place / "model"
    return finished, models[last]


def finished_before(kept: Path, command: Sequence[str]) -> Finished | None:
    """What came of a stage that this very command finished, as it was kept; None where it did not."""
    if not kept.exists():
        return None
    found = results.read_json(kept)
    return Finished(**found["finished"]) if found["command"] == list(command) else None


def processor_seconds_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def run_chain(device: str, folder: Path, run: Run, say: Callable[[str], Any], resume: bool = False) -> dict[str, Any]:
    """Run the chain, then ask the last model; the figures and answers as JSON can hold them."""
    with RunFolder(folder, "chain").held():
        finished, model = run_stages(stages(device), folder, run, say, resume)
        answers = []
        for task in corpora.arithmetic(QUESTIONS, SEED_OF_QUESTIONS, difficulty=2, kinds=["larger"]):
            answer = run(["generate", task.prompt, "--model", str(model), "--max-tokens", "24"]).strip()
            answers.append({"prompt": task.prompt, "answer": answer, "right": bool(corpora.reward(task, answer))})
            say(f"{task.prompt}  {answer}")
    return {"stages": [asdict(stage) for stage in finished], "answers": answers}


def run_alignment(folder: Path, run: Run, say: Callable[[str], Any], resume: bool = False) -> dict[str, Any]:
    """Run the recipes of alignment; the figures as JSON can hold them."""
    with RunFolder(folder, "chain --alignment").held():
        finished, _ = run_stages(alignment_stages(), folder, run, say, resume)
    return {"stages": [asdict(stage) for stage in finished]}


def what_came_of(stage: Stage, folder: Path, seconds: float, processor_seconds: float) -> Finished:
    curves = {name: metrics.curve(folder, name)[1] for name in stage.figures}
    figures = {name: (values[0], values[-1]) for name, values in curves.items() if values}
    steps, parameters = metrics.curve(folder, "loss")[0][-1], weights_in(folder / "model")
    made = stage.command, stage.recipe, stage.settings
    return Finished(
        *made, steps, parameters, seconds, processor_seconds, machine.commit(), figures, mean_speed(folder), source_of_run()
    )  # fmt: skip


def mean_speed(folder: Path) -> dict[str, float]:
    """Over a run but for its first stretch, which compiles. Stretches have as many steps each, so their mean is harmonic."""
    stretches = list(metrics.rows(folder, metrics.SPEED))[1:]
    known = [name for name in ("tokens_per_s", "mfu") if stretches and all(row.get(name) for row in stretches)]
    return {name: statistics.harmonic_mean(row[name] for row in stretches) for name in known}


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


def stage_in_words(stage: Finished) -> str:
    return f"{stage.command} {stage.recipe}: {stage.steps:,} steps in {stage.seconds:.0f} s; {figures_in_words(stage.figures, ', ')}"  # fmt: skip


def figures_in_words(figures: Mapping[str, Sequence[float]], between: str = "; ") -> str:
    """Each figure from its first measurement to its last."""
    return between.join(f"{name.replace('_', ' ')} {first:.3f} → {last:.3f}" for name, (first, last) in figures.items())


def speed_in_words(speed: Mapping[str, float]) -> str:
    parts = [f"{speed['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in speed else []
    return ", ".join([*parts, *([f"{speed['mfu']:.1%} MFU"] if "mfu" in speed else [])])


def save_chain(folder: Path, stamp: dict[str, Any], found: dict[str, Any], name: str) -> Path:
    path = results.path_of(stamp["slug"], name, folder)
    results.save(path, {"machine": stamp, **found})
    return path


def run_tilestack(command: Sequence[str]) -> str:
    """Run a command of tilestack as people do; what it says on the way goes to the terminal. Raises where it fails."""
    done = subprocess.run([sys.executable, "-m", "tilestack", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"tilestack {command[0]} ended with {done.returncode}, and the chain with it")
    return done.stdout
