"""`tilestack demo`: the whole stack on this machine in a few minutes."""

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tilestack.cli.common import (
    console,
    kernel_device,
    pick_dtypes,
    pick_operators,
    prove_all,
    share_the_cores,
    writable_folder,
)
from tilestack.cli.recipes import find_recipe
from tilestack.cli.train import Set
from tilestack.shipped import shipped

if TYPE_CHECKING:
    from tilestack.lab.report.page import Section
    from tilestack.train import Recipe

# One of each kind, so that the demo takes minutes even where Triton is interpreted; `verify` and `bench` take them all.
DEMONSTRATED = ["add", "gelu", "softmax", "rms_norm", "linear"]


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    output: Annotated[
        Path,
        typer.Option(
            help="Output folder for the run, its model, measurements and the report.",
            callback=writable_folder,
        ),
    ] = Path("runs/demo"),
    set_: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the demo in the folder and start over.")] = False,
) -> None:
    """Show the whole stack on this machine in a few minutes: doctor, proofs, a model trained and served, measurements, a report."""
    share_the_cores()
    place = kernel_device(None)
    from tilestack.extras import MissingExtra
    from tilestack.lab import contests, machine, results
    from tilestack.lab.bench import terminal_tables
    from tilestack.lab.bench.operators import bench_operators
    from tilestack.lab.doctor import doctor, render_findings
    from tilestack.lab.proof import proved, verify
    from tilestack.lab.proof.workers import tasks_for
    from tilestack.lab.report.write import write_report
    from tilestack.train import Recipe
    from tilestack.train.run.folder import RunFolder

    recipe = Recipe.load(find_recipe(Path("demo-gpu" if place.type == "cuda" else "demo")), set_ or ())
    RunFolder(output, "demo")  # refuses what is not ours before anything is done
    operators = pick_operators(DEMONSTRATED)
    console.rule("1. What is here")
    console.print(render_findings(doctor()))
    console.rule("2. Are the kernels right?")
    only = {operator.name: "triton" for operator in operators}
    tasks = tasks_for(operators, place, only=only, dtypes=pick_dtypes("float32"), kinds=("check",), every_variant=False)
    proofs = prove_all(tasks)
    console.print(verify.render_proofs(proofs, place))
    console.rule("3. A model, trained here")
    show_training = train_demonstration(recipe, output, fresh)
    console.rule("4. The model, served")
    served = serve_demonstration(output / "model", place.type)
    console.rule("5. How fast is this machine, and what runs on it?")
    stamp = machine.stamp(place.type)
    target = results.path_of(stamp["slug"], "kernels", output / "results")
    target.unlink(missing_ok=True)  # of an earlier demo, perhaps on another machine
    peers = None if place.type == "cpu" else ["triton", "aten"]
    rows = bench_operators(operators, backends=peers, device=place, save=target, console=Console(stderr=True))
    for table in terminal_tables.render_rows(rows, stamp):
        console.print(table)
    console.rule("6. The report")
    found = contests.results_under(output / "results") + contests.results_under(shipped("results"))
    try:
        kept = proved.sections([shipped("results")], stamp["slug"])
        written = write_report(
            output / "report.html", found, [asdict(p) for p in proofs], stamp, [show_training(), *served], kept
        )
        console.print(f"open [bold]{escape(str(written))}[/bold] in a browser")
    except MissingExtra as missing:
        console.print(escape(f"no page, since {missing}"), soft_wrap=True)
    console.print(escape(f"talk to the model: {continue_with(output)}"), highlight=False, soft_wrap=True)
    if any(proof.ok is False for proof in proofs):
        raise typer.Exit(1)


def continue_with(folder: Path) -> str:
    """A command that shows the demo's model at its best: drawn from its likelier tokens, not the likeliest each time."""
    return f"tilestack generate --model {shlex.quote(str(folder / 'model'))} --raw --temperature 0.6 --top-k 40 'def main('"


def serve_demonstration(model: Path, device: str) -> list["Section"]:
    """Ask a server of the model once, and show what came; nothing where the server's packages are missing."""
    import importlib.util

    from tilestack.extras import install_command
    from tilestack.lab.report.served_request import serve_once, served_section

    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        console.print(escape(f"no server, since its packages are missing: {install_command('server')}"), soft_wrap=True)
        return []
    served = serve_once(model, "def main(", device)
    console.print(Text.assemble((served.prompt, "bold"), served.answer))
    console.print(
        f"{served.tokens} tokens over HTTP, the first after {served.first_ms:.0f} ms; yourself: "
        f"[bold]tilestack serve --model {escape(shlex.quote(str(model)))}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
    return [served_section(served)]


def train_demonstration(recipe: "Recipe", folder: Path, fresh: bool) -> Callable[[], "Section"]:
    """Train a small model of Python code, hold it against compressors and counts, let it write, and say how to show it."""
    from tilestack.lab import machine
    from tilestack.lab.report import training_run
    from tilestack.train import metrics
    from tilestack.train.errors import Interrupted
    from tilestack.train.pretrain import pretrain

    said = Console(stderr=True)
    try:
        figures = pretrain(recipe, folder, command="demo", fresh=fresh, provenance=machine.stamp(), console=said)
    except Interrupted as stopped:
        said.print(escape(str(stopped)), highlight=False, soft_wrap=True)
        raise typer.Exit(stopped.code) from None
    others = training_run.measure_baselines(recipe, folder)
    console.print(
        f"bits a byte of held-out text: [bold]{figures['bits_per_byte']:.3f}[/bold] this model, "
        f"{others.five_gram:.3f} 5-gram counts, {others.zlib:.3f} zlib, {others.lzma:.3f} lzma",
        highlight=False,
    )
    written = [row["sample"] for row in metrics.rows(folder) if row.get("step") == recipe.run.steps and "sample" in row]
    samples = [
        (prompt, text.removeprefix(prompt)) for prompt, text in zip(recipe.evaluation.prompts, written, strict=True)
    ]
    for prompt, more in samples:
        console.print(Text.assemble((prompt, "bold"), more))
    return lambda: training_run.training_section(folder, figures, others, samples)
