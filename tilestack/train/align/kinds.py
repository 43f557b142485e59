"""SFT, DPO, KTO and GRPO as runs: each takes a recipe of its own kind and a folder."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tilestack import data
from tilestack.parallel.mesh import Mesh
from tilestack.parallel.placement import Placement
from tilestack.train import checkpoint
from tilestack.train.align import dpo, grpo, kto, sft
from tilestack.train.align.dpo import DPO, DPORecipe
from tilestack.train.align.grpo import GRPO, GRPORecipe
from tilestack.train.align.kto import KTO, KTORecipe
from tilestack.train.align.sft import SFT, SFTRecipe
from tilestack.train.objective import Objective
from tilestack.train.recipe import Recipe
from tilestack.train.run.follow import MakeObjective, follow
from tilestack.train.settings import RecipeError


@dataclass(frozen=True)
class Kind:
    """A kind of run: its recipe, the texts that a new tokenizer is trained on, and how its objective is made."""

    recipe: type[Recipe]
    texts: Callable[[Any], Iterator[str]]
    objective: Callable[[Any, Placement, data.Tokenizer, torch.device, Path], SFT | DPO | KTO | GRPO]


KINDS = {
    "sft": Kind(SFTRecipe, sft.texts, lambda *given: SFT(*given[:-1])),
    "dpo": Kind(DPORecipe, dpo.texts, DPO),
    "kto": Kind(KTORecipe, kto.texts, KTO),
    "grpo": Kind(GRPORecipe, grpo.texts, lambda *given: GRPO(*given[:-1])),
}
NO_END = (
    "the chat template writes no special token after an answer, so the model does not learn to end one; data.chat_template "
    "takes a template that does"
)


def align(
    kind: str,
    recipe: Recipe,
    folder: Path,
    *,
    fresh: bool = False,
    profile: int = 0,
    provenance: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Follow a recipe of one of the KINDS in a folder, and leave the model in `folder/model`, ready to chat."""
    if recipe.precision.fp8_head and kind != "sft":
        raise RecipeError(
            f"precision.fp8_head is for train and sft: {kind} compares log-probabilities, which the head makes without fp8"
        )
    cache = folder.parent / ".reference"  # beside the run: others of the same model and data find it

    def prepare(console: Console, mesh: Mesh) -> tuple[data.Tokenizer, MakeObjective]:
        found = find_tokenizer(KINDS[kind], recipe, folder, mesh.first)
        tokenizer = found.for_chat(read_template(recipe))
        if kind != "grpo" and tokenizer.answer_end is None:  # whose answers are the model's own, as they end
            console.print(NO_END, highlight=False, soft_wrap=True)
        tokenizer.chat_cache = chats = data.ChatCache(folder / "chats")

        def make(placement: Placement, device: torch.device) -> Objective:
            model: Any = placement.model
            ends = (*tokenizer.stops, *found.stops, *model.config.eos)
            model.config = replace(model.config, eos=tuple(dict.fromkeys(ends)))
            objective = KINDS[kind].objective(recipe, placement, tokenizer, device, cache)
            if mesh.first:
                chats.sweep()
            refuse_other_examples(objective.deck.made_of, mesh)
            return objective

        return tokenizer, make

    return follow(
        recipe,
        folder,
        prepare,
        command=kind,
        fresh=fresh,
        profile=profile,
        row=None if kind == "sft" else 1,
        provenance=provenance,
        console=console,
    )


def refuse_other_examples(digest: str, mesh: Mesh) -> None:
    """Refuse processes of which some have read other examples than the first: what they dealt would not be shares of the
    same."""
    told = mesh.texts(digest)
    if wrong := [rank for rank, found in enumerate(told) if found != told[0]]:
        raise data.DataError(
            f"rank {wrong[0]} has read other examples than rank 0; give all machines the same data.files and chat template"
        )


def find_tokenizer(kind: Kind, recipe: Recipe, folder: Path, trains: bool = True) -> data.Tokenizer:
    """The tokenizer that the recipe names, else the model's; for a new model, one trained on the recipe's texts. A process that
    does not train one finds what another has."""
    if named := recipe.data.tokenizer or recipe.model.path:
        return data.Tokenizer.load(named)
    kept = folder / "tokenizer"
    if not trains or (checkpoint.Checkpoints(folder / "checkpoints", 1).steps() and kept.is_dir()):
        return data.Tokenizer.load(kept)
    tokenizer = data.Tokenizer.train(kind.texts(recipe), recipe.data.vocabulary)
    tokenizer.save(kept)
    return tokenizer


def read_template(recipe: Any) -> str | None:
    """The chat template that the recipe names."""
    path = Path(recipe.data.chat_template)
    if not recipe.data.chat_template:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecipeError(f"data.chat_template: {path} cannot be read: {problem}") from problem
