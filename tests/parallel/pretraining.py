"""Pretraining runs of a tiny model on a few texts, for processes of a group and for one alone."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from tilestack.train import Recipe
from tilestack.train.pretrain import pretrain
from tilestack.train.settings import read

MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def write_texts(folder: Path) -> Path:
    path = folder / "text.jsonl"
    words = ["def", "return", "class", "for", "while", "import", "yield", "lambda"]
    texts = [" ".join(words[(i * j) % 8] for j in range(3, 40)) for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def recipe(texts: Path, steps: int, batch: int, optimizer: str = "sgd", accumulate: int = 1, **parallel) -> Recipe:
    return read(Recipe, {
        "run": {"steps": steps, "device": "cpu", "log_every": 2},
        "model": {"config": MODEL},
        "data": {"corpus": "files", "files": [str(texts)], "vocabulary": 301, "validation": 0.2, "sequence": 24, "batch": batch, "accumulate": accumulate},
        "optimizer": {"name": optimizer, "lr": 0.05},
        "schedule": {"name": "constant"},
        "evaluation": {"every": 1, "batches": 1, "prompts": ["def "], "sample_tokens": 3},
        "checkpoint": {"every": 2, "keep": 9},
        "ema": {"decay": 0.9},
        "parallel": parallel,
    })  # fmt: skip


def run(texts: Path, folder: Path, steps: int, batch: int, optimizer: str = "sgd", **how) -> None:
    pretrain(recipe(texts, steps, batch, optimizer, **how), folder, console=Console(quiet=True))


def interrupted_and_not(_, texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    """On two processes, by each layout: a run of four steps at once, and one of two that is continued."""
    for name, (optimizer, how) in LAYOUTS.items():
        run(texts, folder / f"{name} at once", 4, 1, optimizer, **how)
        for steps in (2, 4):
            run(texts, folder / f"{name} in two", steps, 1, optimizer, **how)
    # Both are continued by one process, and then by two again, in another way.
    run(texts, folder / "moving", 2, 1)
    run(texts, folder / "moving stages", 2, 1, **STAGES)
    return {}


def continued(_, texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    run(texts, folder / "moving", 6, 2, tensor=dist.get_world_size())
    run(texts, folder / "moving stages", 6, 1)
    return {}


STAGES = {"pipeline": 2, "accumulate": 2}  # of one row each: as many as in the other runs
LAYOUTS = {
    "data": ("adamw", {}),
    "sharded": ("adamw", {"shard": True}),
    "tensor": ("adamw", {"tensor": 2}),
    "pipeline": ("adamw", STAGES),
    "pipeline by muon": ("muon", STAGES),
}
