"""The `parity` command: the proof that backends, and fp8, train alike."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tilestack.cli.common import JsonFile, console, kernel_device, report_page, write_json
from tilestack.cli.recipes import find_recipe
from tilestack.cli.train import Set
from tilestack.extras import MissingExtra

if TYPE_CHECKING:
    import torch

    from tilestack.lab.training.parity import Parity
    from tilestack.train import Recipe


def add_to(app: typer.Typer) -> None:
    app.command("parity")(parity_command)


def parity_command(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe; default: parity on a CPU (parity-fp8 for fp8), pretrain-100m on a GPU.", show_default=False),
    ] = None,
    set_: Set = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train; 300 for fp8, else 100 on a GPU and 5 on a CPU.", min=1, show_default=False)] = None,
    backend: Annotated[str, typer.Option(help="The backend to compare with the definitions.")] = "triton",
    swap: Annotated[
        list[str] | None,
        typer.Option(help="Swap only this operator; default: all that the backend has.", show_default=False),
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Compare fp8 with the recipe's own precision, instead of a backend with the definitions.")] = False,
    starts: Annotated[int, typer.Option(help="With --fp8, number of starting points (perturbed weights) to train from, to separate chance from the cost of fp8.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="The page with the curves.", callback=report_page)] = Path("runs/parity.html"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu, where kernels are interpreted.", show_default=False)] = None,
    save: Annotated[bool, typer.Option("--save", help="Save the curves to results/<machine>/parity.")] = False,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """Compare loss curves on the definitions and on a backend, or with and without fp8; exit 1 if they differ, naming the
    step.

    The bound is measured: how far the definitions' own curve moves when each initial weight changes by one unit in the
    last place.
    """
    place = kernel_device(device)
    operators = swap or []
    refuse_what_cannot_be_compared(backend, operators, fp8, starts)
    name, read = parity_recipe(recipe, set_ or [], place, fp8)
    found = train_both(read, place, steps, (backend, operators), starts if fp8 else None)
    write_json(json_, found.as_dict())
    if save:
        save_curves(name, read, place, found, fp8)
    try:
        page = f"curves in {write_parity_page(output, found, str(name))}"
    except MissingExtra as missing:
        page = escape(f"no page, since {missing}")
    if str(json_) != "-":
        print_verdict(found, starts, page)
    if found.broken_at is not None:
        raise typer.Exit(1)


def refuse_what_cannot_be_compared(backend: str, operators: list[str], fp8: bool, starts: int) -> None:
    """Refuse misspelt operators, a backend that they lack and options that contradict each other before models are trained."""
    from tilestack import ops
    from tilestack.lab.training.parity import chosen_backend

    for operator in operators:
        ops.operator_named(operator)
    chosen_backend(backend, operators)
    if fp8 and operators:
        raise ValueError("--fp8 and --swap are two comparisons; ask for one of them")
    if starts > 1 and not fp8:
        raise ValueError(
            "--starts is for --fp8: kernels that are right part from the definitions by their rounding alone"
        )


def parity_recipe(recipe: Path | None, settings: list[str], place: "torch.device", fp8: bool) -> tuple[Path, "Recipe"]:
    """The recipe by its name, and as it is trained here."""
    from tilestack.train import Recipe

    on_gpu = place.type == "cuda"
    name = recipe or Path("pretrain-100m" if on_gpu else "parity-fp8" if fp8 else "parity")
    # The definitions keep every score of attention, so they are given a smaller batch than training would take, and with
    # it smaller steps: where the loss leaps about, equally right runs part, and the bound would say nothing.
    smaller = ["data.batch=8", "data.most_bytes=8000000", "optimizer.lr=1e-4"] if on_gpu and recipe is None else []
    always = [f"run.device={place.type}", "run.compile=off"]
    return name, Recipe.load(find_recipe(name), [*always, *smaller, *settings])


def train_both(
    read: "Recipe", place: "torch.device", steps: int | None, swapped: tuple[str, list[str]], fp8_starts: int | None
) -> "Parity":
    """Train by a recipe on the definitions and on a backend of some operators; with a number of starts, in its own precision
    and in fp8."""
    from tilestack.data.prepared import prepare_tokens
    from tilestack.lab.training.parity import fp8_parity, new_model, parity
    from tilestack.train.pretrain import Pretraining

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, tokens = prepare_tokens(read.data, Path(scratch), tokenizer_of=read.model.path)
        objective = Pretraining(read, tokenizer, tokens, place)
        build = lambda: new_model(read, tokenizer.vocabulary)
        say = lambda words: Console(stderr=True).print(f"training on {words}", highlight=False)
        if fp8_starts is not None:
            return fp8_parity(read, build, objective, steps or 300, fp8_starts, say)
        return parity(read, build, objective, steps or (100 if place.type == "cuda" else 5), *swapped, say)


def save_curves(name: Path, read: "Recipe", place: "torch.device", found: "Parity", fp8: bool) -> None:
    """Keep the curves in results/. What fp8 is held against is the recipe itself, so runs of several recipes are kept beside
    each other."""
    from tilestack.lab import machine, results
    from tilestack.lab.training import loss_curves

    trained = f"{name}, batches of {read.data.batch} x {read.data.sequence} tokens, lr {read.optimizer.lr:g}, {len(found.reference)} steps, {read.precision.compute}"  # fmt: skip
    kept = found.as_dict() | ({"name": trained} if fp8 else {})
    file = loss_curves.FP8_CURVES if fp8 else loss_curves.CURVES
    loss_curves.merge_curves(results.FOLDER, machine.stamp(place.type), trained, kept, file)


def print_verdict(found: "Parity", starts: int, page: str) -> None:
    """Whether the curves agree, how far they part, and where they are drawn."""
    from tilestack.lab.training.loss_curves import gap_over_starts

    verdict = f"[green]agrees[/green] over {len(found.reference)} steps" if found.broken_at is None else f"[red]parts at step {found.broken_at}[/red]"  # fmt: skip
    if starts > 1:
        above, apart = gap_over_starts(found.ends)
        console.print(f"{found.name} ends above {found.against} by {above}, whose own ends have a spread of {apart}", highlight=False)  # fmt: skip
    console.print(f"{found.name}: {verdict}; largest difference {max(found.differences):.3g}, {found.worst:.0%} of what is allowed; {page}", highlight=False)  # fmt: skip


def write_parity_page(path: Path, found: "Parity", model: str) -> Path:
    """The two curves, and their difference under its bound."""
    from tilestack.lab import machine
    from tilestack.lab.report.page import Section, colour, plot, write_page

    steps = list(range(1, len(found.reference) + 1))
    line = lambda name, ys, shade, **how: dict(
        type="scatter", mode="lines", name=name, x=steps, y=ys, line=dict(color=colour(shade), **how)
    )
    curves = [line(found.against, found.reference, "muted", width=5), line(found.name, found.candidate, "blue")]
    apart = [line("difference", found.differences, "blue"), line("bound", found.bound, "bad", dash="dash")]
    axes = lambda title, kind: dict(xaxis=dict(title="step"), yaxis=dict(title=title, type=kind))
    sections = [
        Section("Loss", "Both curves; where they agree, one covers the other.", plot(curves, axes("loss", "linear"), 380, "loss")),
        Section("Difference", "What two equally right runs may differ by, and what these do.", plot(apart, axes("difference of losses", "log"), 380, "difference")),
    ]  # fmt: skip
    verdict = "The curves agree" if found.broken_at is None else f"The curves part at step {found.broken_at}"
    stamp = machine.stamp()
    facts = [("model", model), ("steps", str(len(steps))), ("torch", stamp["torch"]), ("commit", stamp["commit"])]
    return write_page(path, verdict, f"{found.name} against {found.against}", facts, "", sections)
