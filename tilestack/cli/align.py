"""The commands that align a model: from answers to imitate, from preferences, from rewards."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from tilestack.cli.common import share_the_cores
from tilestack.cli.train import Folder, Fresh, Processes, Profile, Set, follow_recipe, launch_command, recipe_argument


def add_to(app: typer.Typer) -> None:
    app.command("sft")(sft_command)
    app.command("dpo")(dpo_command)
    app.command("kto")(kto_command)
    app.command("grpo")(grpo_command)


def sft_command(
    recipe: Annotated[Path, recipe_argument("sft")],
    set_: Set = None,
    folder: Folder = None,
    fresh: Fresh = False,
    profile: Profile = 0,
    processes: Processes = 1,
) -> None:
    """Fine-tune on conversations, training only on the assistant's answers; with lora.rank, only adapters.

    data.files are rows of {"messages": …}, or in the formats of ShareGPT and Alpaca.
    Run folder, resume and --processes work as in [bold]train[/bold].
    """
    run("sft", recipe, set_, folder, fresh, profile, processes)


def dpo_command(
    recipe: Annotated[Path, recipe_argument("dpo")],
    set_: Set = None,
    folder: Folder = None,
    fresh: Fresh = False,
    profile: Profile = 0,
    processes: Processes = 1,
) -> None:
    """Preference optimisation (DPO, IPO, SimPO): pairs of a chosen and a rejected answer, against a frozen reference.

    data.files are rows of {"prompt": …, "chosen": …, "rejected": …}, each a text or messages. dpo.loss may be simpo, which
    needs no reference. Run folder, resume and --processes work as in [bold]train[/bold].
    """
    run("dpo", recipe, set_, folder, fresh, profile, processes)


def kto_command(
    recipe: Annotated[Path, recipe_argument("kto")],
    set_: Set = None,
    folder: Folder = None,
    fresh: Fresh = False,
    profile: Profile = 0,
    processes: Processes = 1,
) -> None:
    """Preference optimisation (KTO): single answers labelled good or bad, against a frozen reference.

    data.files are rows of {"prompt": …, "completion": …, "label": true or false}, or pairs as for [bold]dpo[/bold].
    Run folder, resume and --processes work as in [bold]train[/bold].
    """
    run("kto", recipe, set_, folder, fresh, profile, processes)


def grpo_command(
    recipe: Annotated[Path, recipe_argument("grpo")],
    set_: Set = None,
    folder: Folder = None,
    fresh: Fresh = False,
    profile: Profile = 0,
    processes: Processes = 1,
) -> None:
    """Reinforcement learning (GRPO): sample groups of answers, score them with a program, reinforce those above the mean.

    data.files are rows of {"prompt": text or messages, "answer": text}. grpo.reward names a built-in check or your own
    function, rewards.py:score. Run folder, resume and --processes work as in [bold]train[/bold].
    """
    run("grpo", recipe, set_, folder, fresh, profile, processes)


def run(
    kind: str, recipe: Path, set_: list[str] | None, folder: Path | None, fresh: bool, profile: int, processes: int
) -> None:
    share_the_cores()
    from tilestack.train.align import KINDS, align

    if processes > 1:
        launch_command(kind, KINDS[kind].recipe, processes, recipe, set_, folder, fresh, profile)
    follow_recipe(KINDS[kind].recipe, functools.partial(align, kind), recipe, set_, folder, fresh, profile)
