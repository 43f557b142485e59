"""The papers of a run: its recipe in full, and how it was made.

A run is continued only under a recipe of the same identity: model, data, seed, and whatever else its numbers rest on.
Operational settings may change, as the learning rate does after a step that broke; run.json says when and how.
"""

import json
import sys
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tilestack
from tilestack.files import write_text_whole
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, as_toml, differences, keys_of, load_table, read, value_at

RECIPE, ABOUT = "recipe.toml", "run.json"


def begin(folder: Path, recipe: Recipe, resumes: bool, provenance: Mapping[str, Any]) -> None:
    """Write the papers of a run that starts or continues."""
    changed = changes(folder, recipe) if resumes else {}
    about = {
        "command": " ".join(sys.argv), "tilestack": tilestack.__version__, "torch": torch.__version__,
        "threads": torch.get_num_threads(), **provenance,
    }  # fmt: skip
    entry: dict[str, Any] = {
        "id": uuid.uuid4().hex[:12],
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **about,
    }
    if changed:
        entry["changed"] = changed
    earlier = json.loads((folder / ABOUT).read_text()) if resumes and (folder / ABOUT).exists() else []
    write_text_whole(folder / ABOUT, json.dumps([*earlier, entry], indent=1) + "\n")
    if changed or not resumes:
        write_text_whole(folder / RECIPE, as_toml(recipe.table()))


def changes(folder: Path, recipe: Recipe) -> dict[str, list[Any]]:
    """What differs between the recipe a run was last under and this one: [before, now] by key. What says that it is another
    run is refused."""
    ours = recipe.table()
    theirs = read(type(recipe), load_table(folder / RECIPE)).table()
    operational = {key.name for key in keys_of(type(recipe)) if key.operational}
    changed = differences(ours, theirs)
    if others := [key for key in changed if key not in operational]:
        raise RecipeError(
            f"{folder} holds another run: {', '.join(others)} differ{'s' if len(others) == 1 else ''}. "
            "Train in another folder (--folder), or start this one over (--fresh)"
        )
    return {key: [value_at(theirs, key), value_at(ours, key)] for key in changed}
