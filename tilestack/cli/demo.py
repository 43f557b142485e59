"""`tilestack demo`: the whole stack on this machine in a few minutes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tilestack.cli.common import console, kernel_device, pick_dtypes, pick_operators, prove_all

if TYPE_CHECKING:
    import torch

    from tilestack.lab.page import Section

# One of each kind, so that the demo takes minutes even where Triton is interpreted; `verify` and `bench` take them all.
DEMONSTRATED = ["add", "gelu", "softmax", "rms_norm", "linear"]


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    output: Annotated[Path, typer.Option(help="Where to put what the demo makes.")] = Path("runs/demo"),
) -> None:
    """Show the whole stack on this machine in a few minutes: doctor, proofs, measurements, a model trained, a report."""
    place = kernel_device(None)
    from tilestack.lab import bench, machine, measured, report, results, verify

    operators = pick_operators(DEMONSTRATED)
    console.rule("1. What is here")
    console.print(machine.render(machine.doctor()))
    console.rule("2. Are the kernels right?")
    only = {described.name: "triton" for described in operators}
    proofs = prove_all(verify.claims(operators, place, only=only, dtypes=pick_dtypes("float32"), every_variant=False))
    console.print(verify.render(proofs, place))
    console.rule("3. How fast is this machine, and what runs on it?")
    stamp = machine.stamp(place.type)
    target = results.path_of(stamp["slug"], "kernels", output / "results")
    peers = None if place.type == "cpu" else ["triton", "aten"]
    rows = bench.bench(operators, backends=peers, device=place, save=target, console=Console(stderr=True))
    for table in bench.tables(rows, stamp):
        console.print(table)
    console.rule("4. A model, trained here")
    section = train_demonstration(output, place)
    console.rule("5. The report")
    page = report.write_report(
        output / "report.html",
        measured.results_under(output / "results"),
        [asdict(p) for p in proofs],
        stamp,
        [section],
    )
    console.print(f"open [bold]{page}[/bold] in a browser")
    if any(proof.ok is False for proof in proofs):
        raise typer.Exit(1)


def train_demonstration(output: Path, place: "torch.device") -> "Section":
    """Train a small model of Python code, hold it against compressors and counts, and let it write."""
    from tilestack.cli.train import find_recipe
    from tilestack.lab import machine, training
    from tilestack.train import Recipe, metrics
    from tilestack.train.pretrain import pretrain

    recipe = Recipe.load(find_recipe(Path("demo-gpu" if place.type == "cuda" else "demo")))
    folder = output / "model"
    figures = pretrain(recipe, folder, provenance=machine.stamp(place.type), console=Console(stderr=True))
    others = training.measure_baselines(recipe, folder)
    console.print(
        f"bits a byte of held-out text: [bold]{figures['bits_per_byte']:.3f}[/bold] this model, "
        f"{others.five_gram:.3f} 5-gram counts, {others.zlib:.3f} zlib, {others.lzma:.3f} lzma",
        highlight=False,
    )
    samples = [row["sample"] for row in metrics.rows(folder) if row.get("step") == recipe.run.steps and "sample" in row]
    for sample in samples:
        console.print(sample, highlight=False, markup=False)
    console.print(f"go on with: tilestack generate --model {folder / 'model'} 'def main('", highlight=False)
    return training.training_section(folder, figures, others, samples)
