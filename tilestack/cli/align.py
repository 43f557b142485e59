"""The commands that align a model: from answers to imitate, from preferences, from rewards."""

from pathlib import Path

import typer
from rich.console import Console

from tilestack.cli.common import console
from tilestack.cli.train import Folder, Fresh, RecipeFile, Set, find_recipe


def add_to(app: typer.Typer) -> None:
    app.command("sft")(sft_command)
    app.command("dpo")(dpo_command)
    app.command("grpo")(grpo_command)


def sft_command(recipe: RecipeFile, set_: Set = None, folder: Folder = None, fresh: Fresh = False) -> None:
    """Fine-tune on conversations, learning only the assistant's answers; with lora.rank, adapters alone.

    data.files are rows of {"messages": …}, as chat models know them.
    Run folder and resume are those of [bold]train[/bold].
    """
    run("sft", recipe, set_, folder, fresh)


def dpo_command(recipe: RecipeFile, set_: Set = None, folder: Folder = None, fresh: Fresh = False) -> None:
    """Learn from pairs of answers, one chosen and one rejected, against the model as it was.

    data.files are rows of {"prompt": text or messages, "chosen": text, "rejected": text}.
    Run folder and resume are those of [bold]train[/bold].
    """
    run("dpo", recipe, set_, folder, fresh)


def grpo_command(recipe: RecipeFile, set_: Set = None, folder: Folder = None, fresh: Fresh = False) -> None:
    """Learn from rewards: the model answers in groups, a program checks, and what did better than its group is raised.

    data.files are rows of {"prompt": text, "answer": text}. Run folder and resume are those of [bold]train[/bold].
    """
    run("grpo", recipe, set_, folder, fresh)


def run(kind: str, recipe: Path, set_: list[str] | None, folder: Path | None, fresh: bool) -> None:
    from tilestack.lab import machine
    from tilestack.train.align import KINDS, align
    from tilestack.train.loop import start_over

    read = KINDS[kind].recipe.load(find_recipe(recipe), set_ or ())
    place = folder or Path("runs") / read.run.name
    if fresh:
        start_over(place)
    figures = align(kind, read, place, provenance=machine.stamp(), console=Console(stderr=True))
    shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float))
    console.print(f"{place}: {shown}", highlight=False)
