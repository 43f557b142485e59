"""Whole runs of alignment of a tiny new model, for processes of a group and for one alone."""

from pathlib import Path

import torch
from pretraining import MODEL
from rich.console import Console

from tilestack.train.align import KINDS, align
from tilestack.train.settings import read

OWN = {
    "grpo": {"group": 3, "max_new_tokens": 4, "reuse": 2},  # so that odd steps leave answers to a checkpoint
}
REWARD = "def score(task, text):\n    return len(text) % 3\n"  # the answers of random weights are never right
# What two processes do, and after which step they are stopped; each is run at once and in two parts.
RUNS = {
    "sft sharded adapters": ("sft", 2, {"shard": True}, {"lora": {"rank": 2}}),
    "dpo tensor": ("dpo", 2, {"tensor": 2}, {}),
    "grpo sharded": ("grpo", 1, {"shard": True}, {}),
}


def recipe(kind: str, folder: Path, steps: int, batch: int, optimizer: str, parallel: dict, more: dict):
    own = dict(OWN.get(kind, {}))
    if kind == "grpo":
        own["reward"] = f"{folder / 'rewards.py'}:score"
    return read(KINDS[kind].recipe, {
        "run": {"steps": steps, "device": "cpu", "log_every": 1},
        "model": {"config": MODEL | {"max_position_embeddings": 96, "initializer_range": 0.2}},
        "data": {"examples": 24, "vocabulary": 301, "validation": 0.1, "sequence": 96, "batch": batch},
        "optimizer": {"name": optimizer, "lr": 0.05 if optimizer == "sgd" else 1e-3},
        "schedule": {"name": "constant"},
        "evaluation": {"sample_tokens": 3},
        "checkpoint": {"every": 1, "keep": 9},
        "parallel": parallel,
        **({kind: own} if own else {}),
        **more,
    })  # fmt: skip


def run(kind: str, folder: Path, name: str, steps: int, batch: int, optimizer="sgd", parallel=None, more=None) -> None:
    made = recipe(kind, folder, steps, batch, optimizer, parallel or {}, more or {})
    align(kind, made, folder / name, console=Console(quiet=True))


def in_two_processes(_, folder: Path) -> dict[str, torch.Tensor]:
    for name, (kind, stop, parallel, more) in RUNS.items():
        run(kind, folder, f"{name} at once", 3, 2, "adamw", parallel, more)
        for steps in (stop, 3):
            run(kind, folder, f"{name} in two", steps, 2, "adamw", parallel, more)
    for kind in ("dpo", "grpo"):  # which one process goes on with
        run(kind, folder, f"{kind} moving", 1, 2, parallel={"shard": True})
    return {}
