"""What can be known before the first step is checked before the first step: that model and batch can fit into memory, a
checkpoint onto the disk, rows into the model's positions, and that there is something to sample from.

Memory is bounded from below: weights, gradients, the optimizer's states, and of activations only what enters each layer.
So what is refused could not have run, and what is close may still run out of memory.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilestack.data import Tokenizer
from tilestack.train.execution import DTYPES
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError

STATES = {"adamw": 2, "adamw8bit": 2, "sgd": 1, "muon": 1}  # values an optimizer keeps of each parameter, at least
ID_BYTES = 3 * 8  # of a token: its id, label and position


@dataclass(frozen=True)
class Needs:
    """Bytes that a run cannot do without."""

    weights: int
    gradients: int
    states: int
    batch: int

    @property
    def all(self) -> int:
        return self.weights + self.gradients + self.states + self.batch

    def divided(self, processes: float) -> "Needs":
        """What each of so many processes needs that have a part of the model; where they have unequal parts of its tensors, the
        number is that of equal ones."""
        weights, gradients, states = (int(size // processes) for size in (self.weights, self.gradients, self.states))
        return Needs(weights, gradients, states, self.batch)

    @property
    def checkpoint(self) -> int:
        """Weights that learn, each of which has a gradient as large, and the optimizer's states."""
        return self.gradients + self.states


def least_needs(recipe: Recipe, model: Any, row: int) -> Needs:
    """What a recipe takes at least, with rows of so many tokens; the model may be a description on the meta device."""
    wide = DTYPES[recipe.precision.parameters].itemsize
    weights = sum(param.numel() for param in model.parameters()) * wide
    learned = 0 if recipe.lora.rank else weights
    each = {"adamw8bit": 1}.get(recipe.optimizer.name, wide)
    states = learned // wide * each * STATES[recipe.optimizer.name]
    config = model.config
    activations = config.layers * config.hidden * DTYPES[recipe.precision.compute].itemsize
    return Needs(weights, learned, states, recipe.data.batch * row * (ID_BYTES + activations))


def refuse_beyond_memory(needs: Needs, recipe: Recipe, device: torch.device) -> None:
    """Refuse what cannot fit, naming the setting that would help most."""
    free = free_memory(device)
    if free is None or needs.all <= free:
        return
    where = f"{in_bytes(needs.all)} at least, and {in_bytes(free)} are free on the {device.type.upper()}"
    if needs.all - needs.batch <= free:
        raise RecipeError(
            f"data.batch = {recipe.data.batch} rows of up to {recipe.data.sequence} tokens need {where}; "
            "take a smaller data.batch, and a larger data.accumulate in its place"
        )
    raise RecipeError(f"the model, its gradients and the optimizer's states need {where}; take a smaller model")


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free for this process; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    table = text_of(Path("/proc/meminfo"))
    found = {name: int(size) << 10 for name, size in re.findall(r"^(MemAvailable|SwapFree):\s*(\d+) kB", table, re.M)}
    if "MemAvailable" not in found:
        return None
    free = sum(found.values())
    limit, used = (text_of(Path("/sys/fs/cgroup") / name).strip() for name in ("memory.max", "memory.current"))
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def refuse_beyond_disk(needs: Needs, folder: Path) -> None:
    """Refuse a run whose first checkpoint would fill the disk: it is written before an older one goes."""
    free = shutil.disk_usage(folder).free
    if needs.checkpoint > free:
        raise RecipeError(
            f"a checkpoint takes {in_bytes(needs.checkpoint)}, and {in_bytes(free)} are free "
            f"where {folder} is; make room, or train elsewhere (--folder)"
        )


def refuse_beyond_positions(recipe: Recipe, positions: int) -> None:
    if recipe.data.sequence > positions:
        raise RecipeError(
            f"data.sequence = {recipe.data.sequence} is more than the {positions} positions the model was made for "
            "(max_position_embeddings)"
        )


def refuse_prompts(recipe: Recipe, tokenizer: Tokenizer, positions: int) -> None:
    """Refuse prompts that nothing can follow."""
    for prompt in recipe.evaluation.prompts:
        tokens = len(tokenizer.encode(prompt))
        if not tokens or tokens + recipe.evaluation.sample_tokens > positions:
            raise RecipeError(
                f"evaluation.prompts: {prompt[:40]!r} has {tokens} tokens; with evaluation.sample_tokens = "
                f"{recipe.evaluation.sample_tokens} there must be 1 to {positions} together"
            )


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def in_bytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
