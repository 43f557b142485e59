"""The `chain` command: recipes one after another, each from the model before it, and their figures."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tilestack.cli.common import JsonFile, console, in_home, write_json


def add_to(app: typer.Typer) -> None:
    app.command("chain")(chain_command)


def chain_command(
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Output folder, with a folder per run.",
            callback=in_home,
            show_default="runs/chain or runs/alignment",
        ),
    ] = None,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Instead, sft, then grpo, dpo and kto, each from its model.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume an interrupted chain, or from where its recipes changed."),
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Save the results to results/<machine>/recipes.")] = False,
    json_: JsonFile = None,
) -> None:
    """Run the recipes from pretraining to a model that answers (train, sft, dpo, grpo, generate), each from the previous
    model, and report the results of each. On a GPU pretraining is demo-gpu, elsewhere demo.
    """
    import torch

    from tilestack.lab import machine, results
    from tilestack.lab.training import chain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    said = Console(stderr=True)
    told = lambda text: said.print(escape(text), highlight=False, soft_wrap=True)
    name = "alignment" if alignment else "chain"
    place = folder or Path("runs", name)
    if alignment:
        found = chain.run_alignment(place, chain.run_tilestack, told, resume)
    else:
        found = chain.run_chain(device, place, chain.run_tilestack, told, resume)
    write_json(json_, found)
    if save:
        file = chain.ALIGNMENT if alignment else chain.CHAIN
        console.print(
            f"kept in {chain.save_chain(results.FOLDER, machine.stamp(device), found, file)}", highlight=False
        )
