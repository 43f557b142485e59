"""Pretraining: predict every next token of packed documents, and leave a folder that transformers can open."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from tilestack import data, models
from tilestack.data import DataError
from tilestack.data.prepared import open_tokens, prepare_tokens
from tilestack.parallel.mesh import Mesh
from tilestack.parallel.placement import Placement
from tilestack.parallel.sequence import cut_batch
from tilestack.train.checkpoint import Checkpoints
from tilestack.train.next_token import next_token_loss
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.run.follow import MakeObjective, follow


class Pretraining:
    """The objective of a language model on a token file, part of which is held out."""

    fixed_shapes = True

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: data.Tokenizer,
        tokens: data.TokenFile,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        cut: Callable[[data.Batch], data.Batch] | None = None,
    ):
        """`rank` of `world` processes that read other rows each; `cut` takes what this one has of its rows."""
        self.cut = cut
        self.recipe, self.tokenizer, self.tokens, self.device = recipe, tokenizer, tokens, device
        share = recipe.data.validation
        held_out = len(tokens.documents("validation", share))
        if recipe.data.validation_files and not held_out:
            raise DataError(f"there is no text in data.validation_files = {list(recipe.data.validation_files)}")
        if share and not held_out:
            raise DataError(
                f"none of the {len(tokens):,} documents falls into the share of {share} that data.validation holds out; "
                "set it higher, or to 0 to hold out none"
            )
        self.stream = self._stream("train" if recipe.data.holds_out else "all", recipe.data.weights, rank, world)
        self.counts = {
            "documents": self.stream.documents,
            "documents held out": held_out,
            "empty documents left out": tokens.meta.get("empty", 0),
            "tokens": tokens.meta["tokens"],
        }

    def _stream(self, split: str, weights: Sequence[float] = (), rank: int = 0, world: int = 1) -> data.Packed:
        settings = self.recipe.data
        return data.Packed(
            self.tokens, settings.sequence, settings.batch, self.recipe.run.seed, split=split,
            validation=settings.validation, weights=weights, rank=rank, world=world,
        )  # fmt: skip

    def next_batch(self) -> data.Batch:
        batch = next(self.stream)
        return (batch if self.cut is None else self.cut(batch)).to(self.device)

    def loss(self, model: nn.Module, batch: data.Batch) -> Loss:
        return Loss(next_token_loss(model, batch), batch.valid, tokens=batch.ids.numel())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss on the same held-out batches every time, and on every process, in nats a token and in bits a byte of
        text."""
        if not self.recipe.data.holds_out:
            return {}
        stream, bytes_of = self._stream("validation"), torch.tensor(self.tokenizer.token_bytes)
        total, count, size = torch.zeros((), device=self.device), 0, 0
        for _ in range(self.recipe.evaluation.batches):
            batch = next(stream)
            total += next_token_loss(model, batch.to(self.device))
            count += int(batch.valid)
            size += int(bytes_of[batch.labels[batch.labels != data.NO_LABEL]].sum())
        return {"validation_loss": float(total) / count, "bits_per_byte": float(total) / math.log(2) / size}

    def sample(self, model: Any) -> list[str]:
        settings = self.recipe.evaluation
        return [self.continuation(model, prompt, number) for number, prompt in enumerate(settings.prompts)]

    def continuation(self, model: Any, prompt: str, number: int) -> str:
        """A prompt and what the model makes of it; each has chances of its own."""
        settings = self.recipe.evaluation
        ids = torch.tensor([self.tokenizer.encode(prompt)], device=self.device)
        made = models.generate(
            model, ids, max_new_tokens=settings.sample_tokens, temperature=settings.temperature, top_k=settings.top_k,
            seed=self.recipe.run.seed + number, stop=self.tokenizer.stops,
        )  # fmt: skip
        return prompt + self.tokenizer.decode([int(step[0]) for step in made])

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


def pretrain(
    recipe: Recipe,
    folder: Path,
    *,
    command: str = "train",
    fresh: bool = False,
    profile: int = 0,
    provenance: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Follow a pretraining recipe in a folder, and leave the model in `folder/model`."""

    def prepare(console: Console, mesh: Mesh) -> tuple[data.Tokenizer, MakeObjective]:
        if mesh.first:
            resumes = bool(Checkpoints(folder / "checkpoints", 1).steps())
            tokenizer, tokens = prepare_tokens(
                recipe.data, folder, tokenizer_of=recipe.model.path, resumes=resumes, console=console
            )
        else:  # which may not even see the texts
            tokenizer, tokens = open_tokens(recipe.data, folder)

        def make(_: Placement, device: torch.device) -> Pretraining:
            index, ranks = mesh.index("context"), mesh.size("context")
            cut = lambda batch: cut_batch(batch, recipe.parallel.context_by, index, ranks)
            place = mesh.index("data"), mesh.size("data")
            return Pretraining(recipe, tokenizer, tokens, device, *place, cut if ranks > 1 else None)

        return tokenizer, make

    return follow(
        recipe, folder, prepare, command=command, fresh=fresh, profile=profile, provenance=provenance, console=console
    )
