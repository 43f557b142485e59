"""The papers of a run: its recipe in full, and how it was made. A run goes on only under the recipe it began with."""

import json
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tilestack
from tilestack.files import write_text_whole
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, as_toml, differences, load_table

RECIPE, ABOUT = "recipe.toml", "run.json"


def begin(folder: Path, recipe: Recipe, resumes: bool, provenance: Mapping[str, Any]) -> None:
    """Write the papers of a new run; for one that resumes, check that the recipe is the one it began with."""
    folder.mkdir(parents=True, exist_ok=True)
    if resumes:
        refuse_another(folder, recipe)
    about = {
        "command": " ".join(sys.argv), "tilestack": tilestack.__version__, "torch": torch.__version__,
        "threads": torch.get_num_threads(), **provenance,
    }  # fmt: skip
    entry = {"started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **about}
    earlier = json.loads((folder / ABOUT).read_text()) if resumes and (folder / ABOUT).exists() else []
    write_text_whole(folder / ABOUT, json.dumps([*earlier, entry], indent=1) + "\n")
    if not resumes:
        write_text_whole(folder / RECIPE, as_toml(recipe.table()))


def refuse_another(folder: Path, recipe: Recipe) -> None:
    """Refuse a recipe other than the one a run began with, naming what differs."""
    if changed := differences(tomllib.loads(as_toml(recipe.table())), load_table(folder / RECIPE)):
        raise RecipeError(
            f"{folder} holds a run of another recipe: {', '.join(changed)} differ{'s' if len(changed) == 1 else ''}. "
            "Train in another folder (--folder), or start this one over (--fresh)"
        )
