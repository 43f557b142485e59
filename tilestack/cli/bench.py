"""`tilestack bench`: kernels, access patterns, optimizers and whole training steps, measured."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tilestack.cli.common import (
    Device,
    Dtypes,
    JsonFile,
    Load,
    Operators,
    console,
    kernel_device,
    load_files,
    pick_operators,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from tilestack.contract.operator import Operator
    from tilestack.lab.bench_train import Work


def add_to(app: typer.Typer) -> None:
    app.command("bench")(bench_command)


def bench_command(
    operators: Operators = None,
    device: Device = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated backends and peers (aten, compile, liger); all that can run when left out.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtypes = None,
    direction: Annotated[str, typer.Option(help="Comma-separated: forward, backward, both.")] = "forward,backward",
    case: Annotated[str, typer.Option(help="bench, check, or the name of one case.")] = "bench",
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Merge the rows into results/<machine>/kernels.json as they come; on a GPU, in a checkout, renew the table that auto reads.",
        ),
    ] = False,
    json_: JsonFile = None,
    load: Load = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="bench train: comma-separated recipes whose models to train; qwen3-0.6b, or demo on a CPU, when left out.",
            show_default=False,
        ),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            help="bench train: comma-separated numbers of sequences; the recipe's when left out.", show_default=False
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="bench train: tokens of a sequence; the recipe's when left out.", min=2, show_default=False),
    ] = None,
) -> None:
    """Measure kernels against the machine's roofs and against the fastest peer, in one run.

    Kernel time is CUDA-graph replay on cold caches; host time is the cost of a plain call. Without a GPU the definitions
    are timed on the CPU, and the tables say so. `bench memory` sweeps access patterns, `bench optim` times optimizers,
    `bench train` whole training steps beside transformers and Liger, `bench startup` the imports and the command line.
    """
    if operators == ["startup"]:
        bench_starts(json_)
        return
    place = kernel_device(device)
    from tilestack.lab import bench, machine, results
    from tilestack.shipped import checkout
    from tilestack.tuning import preferences

    load_files(load)
    stamp = machine.stamp(place.type)
    if operators == ["memory"]:
        bench_memory_patterns(place, save)
        return
    if operators == ["optim"]:
        bench_optimizers(place, save, json_)
        return
    if operators == ["train"]:
        works = training_works(place, recipe, micro_batch, sequence, dtype)
        bench_training(works, backend.split(",") if backend else None, stamp, save, json_)
        return
    target = results.path_of(stamp["slug"], "kernels") if save else None
    listed = lambda text: text.split(",") if text else None
    chosen = pick_operators(operators)
    check_candidates(listed(backend) or [], chosen)
    rows = bench.bench(
        chosen,
        listed(dtype),
        direction.split(","),
        listed(backend),
        case,
        place,
        target,
        Console(stderr=True),
    )
    write_json(json_, [row.as_dict() for row in rows])
    if str(json_) != "-":
        for table in bench.tables(rows, stamp):
            console.print(table)
    if target is not None:
        console.print(f"saved in {target}")
        if place.type == "cuda" and checkout():  # an installed package is not ours to write into
            console.print(f"auto reads {preferences.write_table(results.load(target))}")


def check_candidates(names: list[str], operators: list["Operator"]) -> None:
    """Refuse a name that is no backend of any of the operators and no peer."""
    from tilestack.lab.peers import PEERS

    known = sorted({*PEERS, *(name for described in operators for name in described.implementations)})
    if unknown := [name for name in names if name not in known]:
        what = operators[0].name if len(operators) == 1 else "these operators"
        has = "has" if len(operators) == 1 else "have"
        raise ValueError(f"no backend or peer is named {', '.join(unknown)}; {what} {has} {', '.join(known)}")


def bench_starts(json_: Path | None) -> None:
    """How long imports and the command line take before anything happens."""
    from tilestack.lab import bench_startup

    found = bench_startup.bench_startup(bench_startup.STARTS)
    write_json(json_, [asdict(start) for start in found])
    if str(json_) != "-":
        console.print(bench_startup.render(found))


def bench_memory_patterns(place: "torch.device", save: bool) -> None:
    """Bandwidth against stride, row length, alignment and gathered rows, as tables and, saved, a page of plots."""
    from tilestack.extras import MissingExtra
    from tilestack.lab import memory, results

    run = memory.bench_memory(place.type, results.FOLDER if save else None, Console(stderr=True))
    for table in memory.tables(memory.points_of(run)):
        console.print(table)
    if not save:
        return
    try:
        console.print(f"plots in {memory.draw(run, Path('runs/memory.html'))}")
    except MissingExtra as missing:
        console.print(escape(f"no page of plots, since {missing}"), soft_wrap=True)


def bench_optimizers(place: "torch.device", save: bool, json_: Path | None) -> None:
    """The step of each optimizer beside torch's; on a CPU, over a few small tensors."""
    from tilestack.lab import bench, machine, results
    from tilestack.lab.bench_optim import CASES, bench_optim
    from tilestack.lab.roofs import measured

    few: list[tuple[int, ...]] = [(256, 64)] * 8
    small = None if place.type == "cuda" else dict.fromkeys(CASES, few)
    rows = bench_optim(device=place.type, shapes=small)
    stamp = machine.stamp(place.type)
    write_json(json_, rows)
    for table in bench.tables([bench.Row.from_dict(row) for row in rows], stamp):
        console.print(table)
    if save:
        target = results.path_of(stamp["slug"], "optimizers")
        results.merge(target, stamp, measured(place.type).as_dict(), rows)
        console.print(f"saved in {target}")


def training_works(
    place: "torch.device", recipes: str | None, micro_batches: str | None, sequence: int | None, dtype: str | None
) -> list["Work"]:
    """What `bench train` does: the models of some recipes, at some micro-batches."""
    from tilestack.cli.recipes import find_recipe
    from tilestack.lab.bench_train import Work
    from tilestack.train import Recipe

    sizes = micro_batches.split(",") if micro_batches else []
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"micro-batches are positive numbers separated by commas, not {micro_batches!r}")
    on_gpu = place.type == "cuda"
    works = []
    for name in (recipes or ("qwen3-0.6b" if on_gpu else "demo")).split(","):
        read = Recipe.load(find_recipe(Path(name)))
        work = Work(
            read.run.name,
            {"vocab_size": read.data.vocabulary, **read.model.config},
            read.data.batch,
            sequence or read.data.sequence,
            dtype or ("bfloat16" if on_gpu else "float32"),
            place.type,
            read.run.backend,
        )
        works += [replace(work, batch=int(size)) for size in sizes] or [work]
    return works


def bench_training(
    works: list["Work"], candidates: list[str] | None, stamp: dict[str, Any], save: bool, json_: Path | None
) -> None:
    """Whole training steps, each candidate in a process of its own."""
    from tilestack.lab import bench_train, results
    from tilestack.lab.roofs import measured

    rows = []
    target = results.path_of(stamp["slug"], "train")
    for work in works:
        found = bench_train.bench_train(work, candidates, Console(stderr=True).print)
        rows += found
        if save:
            results.merge(target, stamp, measured(work.device).as_dict(), found)
    write_json(json_, rows)
    if str(json_) != "-":
        console.print(bench_train.render(rows))
    if save:
        console.print(f"saved in {target}")
