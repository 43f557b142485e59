"""The `recipe` command: every key of a recipe, what it means, accepts and is by default."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from tilestack.cli.common import JsonFile, console, write_json

if TYPE_CHECKING:
    from tilestack.train import Recipe
    from tilestack.train.settings import Key


def add_to(app: typer.Typer) -> None:
    app.command("recipe")(recipe_command)


def recipe_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Only keys that match: lr, data.batch.", show_default=False),
    ] = None,
    command: Annotated[str, typer.Option("--for", help="Recipe type: train, sft, dpo, kto or grpo.")] = "train",
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """List all recipe keys with default, accepted values and meaning. Each works with --set key=value.

    A dot marks keys that may change when a run is resumed; the others identify the run.
    """
    from tilestack.train.settings import keys_of

    recipes = recipe_kinds()
    if command not in recipes:
        raise ValueError(f"--for must be one of {', '.join(recipes)}, not {command!r}")
    keys = list(keys_of(recipes[command]))
    found = wanted(keys, words or [])
    write_json(json_, [asdict(key) for key in found])
    if str(json_) != "-":
        console.print(table_of_keys(found))


def recipe_kinds() -> dict[str, type["Recipe"]]:
    """The commands that follow recipes, and what each can say."""
    from tilestack.train import Recipe
    from tilestack.train.align import KINDS

    return {"train": Recipe, **{name: kind.recipe for name, kind in KINDS.items()}}


def wanted(keys: list["Key"], words: list[str]) -> list["Key"]:
    """The keys that words name, contain or come near; all of them without words."""
    from tilestack.train.settings import nearest_keys

    if not words:
        return keys
    found: dict[str, Key] = {}
    for word in words:
        inside = [key for key in keys if word in key.name or word in key.means]
        some = [key for key in keys if word in (key.name, key.leaf)] or inside or nearest_keys(word, keys)
        if not some:
            raise ValueError(f"no key is called or means {word!r}; `tilestack recipe` lists them all")
        found |= {key.name: key for key in some}
    return list(found.values())


def table_of_keys(keys: list["Key"]) -> Table:
    from tilestack.train.settings import toml_value

    heads = ("key", "", "default", "accepts", "means")
    whole = [Column(head, overflow="fold") for head in heads]  # on a narrow terminal too: they are to be typed
    whole[0].no_wrap = True  # so that grep finds them, and a key can be copied
    made = Table(*whole, box=None, padding=(0, 2, 0, 0))
    section = ""
    for key in keys:
        if section and key.name.split(".")[0] != section:
            made.add_row()
        section = key.name.split(".")[0]
        default = toml_value(list(key.default) if isinstance(key.default, tuple) else key.default)
        made.add_row(f"[bold]{key.name}[/bold]", "·" if key.operational else "", escape(default), key.kind, key.means)
    return made
