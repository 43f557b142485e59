"""Recipes by file or by name: a path of one's own, or one of those that come with tilestack."""

import difflib
from pathlib import Path

from tilestack.shipped import shipped


def recipe_names() -> list[str]:
    """The recipes that come with tilestack."""
    return sorted(path.stem for path in shipped("recipes").glob("*.toml"))


def find_recipe(path: Path) -> Path:
    """The file, or the shipped recipe of that name; `recipes/demo.toml` works where there is no checkout, too."""
    if path.exists() and not path.is_dir():
        return path
    name = path.stem if path.suffix == ".toml" and path.parent == Path("recipes") else str(path)
    if name in recipe_names():
        return shipped("recipes") / f"{name}.toml"
    close = difflib.get_close_matches(path.stem, recipe_names(), n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise FileNotFoundError(f"there is no recipe {path}.{meant} tilestack comes with {', '.join(recipe_names())}")
