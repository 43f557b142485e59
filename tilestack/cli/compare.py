"""`tilestack compare`: what became faster or slower between two sets of results."""

from typing import Annotated

import typer
from rich.console import Console

from tilestack.cli.common import JsonFile, console, write_json


def add_to(app: typer.Typer) -> None:
    app.command("compare")(compare_command)


def compare_command(
    before: Annotated[
        str, typer.Argument(help="A results file, a folder of them (results/ or one machine's), or a git revision.")
    ],
    after: Annotated[str, typer.Argument(help="Likewise.")] = "results",
    operator: Annotated[
        list[str] | None, typer.Option("--operator", "-o", help="Only this one; may be repeated.", show_default=False)
    ] = None,
    ours: Annotated[bool, typer.Option("--ours", help="Leave peers out.")] = False,
    most: Annotated[int, typer.Option(min=1, help="Show at most so many that became slower, and faster.")] = 20,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if something of ours became slower or fails, for CI.")
    ] = False,
    json_: JsonFile = None,
) -> None:
    """Compare two sets of results: what became faster or slower by more than the spread of its measurements.

    [bold]tilestack compare HEAD~5[/bold] compares the saved results of an earlier commit with those of this checkout;
    [bold]tilestack compare before/ results/[/bold] two folders that `bench --save` wrote. Compared are times of operators,
    layers, optimizers and training steps, and figures of serving and HTTP. The latter are saved without a spread: one that
    changed by a tenth or less counts as equal. Parity, profiles, sweeps, proofs and quantised models are not compared.

    Peers' changes are listed too, dimmed: theirs is the code that did not change, so they show how far the machine is off.
    """
    from tilestack.lab.bench import compare
    from tilestack.lab.results import IDENTITY
    from tilestack.lab.rows import SLOWER

    both = compare.rows_of(before), compare.rows_of(after)
    changes, failing = compare.compare_results(*both), compare.failing(*both)
    if operator:
        if unknown := set(operator) - {row["op"] for row in [*(change.after for change in changes), *failing]}:
            raise ValueError(f"nothing named {', '.join(sorted(unknown))} was measured both before and after")
        changes = [change for change in changes if change.after["op"] in operator]
        failing = [row for row in failing if row["op"] in operator]
    if ours:
        changes = [change for change in changes if change.is_ours]
    write_json(json_, [change.as_dict() for change in changes])
    if str(json_) != "-":
        console.print(compare.render_changes(changes, most), highlight=False)
    for row in failing:
        which = ", ".join(row[name] for name in IDENTITY)
        Console(stderr=True).print(f"fails now: {which}: {row['note']}", style="red", markup=False, soft_wrap=True)
    if strict and (failing or any(change.is_ours and change.verdict == SLOWER for change in changes)):
        raise typer.Exit(1)
