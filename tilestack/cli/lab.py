"""The laboratory's commands: what is here, is it right, is it fast."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilestack.ops.backends import interpreting

if TYPE_CHECKING:
    import torch

    from tilestack.lab.bench_train import Work
    from tilestack.lab.page import Section
    from tilestack.lab.verify import Claim, Proof
    from tilestack.ops.contract import Operator

console = Console()

# One of each kind, so that the demo takes minutes even where Triton is interpreted; `verify` and `bench` take them all.
DEMONSTRATED = ["add", "gelu", "softmax", "rms_norm", "linear"]

Operators = Annotated[
    list[str] | None, typer.Argument(help="Operators by name; all of them when left out.", show_default=False)
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cuda or cpu; the GPU when there is one. On cpu, Triton kernels run in its interpreter.",
        show_default=False,
    ),
]
Backend = Annotated[str | None, typer.Option(help="Only this backend.", show_default=False)]
Dtypes = Annotated[
    str | None,
    typer.Option("--dtype", help="Comma-separated: float16, bfloat16, float32, float64.", show_default=False),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the rows to this file; - for standard output.", show_default=False),
]
Load = Annotated[
    list[Path] | None,
    typer.Option(help="A Python file to run first, such as one that registers your own backend.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor_command)
    app.command("ops")(ops_command)
    app.command("verify")(verify_command)
    app.command("bench")(bench_command)
    app.command("explain")(explain_command)
    app.command("report")(report_command)
    app.command("demo")(demo_command)


def pick_device(name: str | None) -> "torch.device":
    """The device to work on. On a CPU, Triton must know when it is imported that it interprets, and PyTorch has imported
    it by now: where nobody said so, the command starts over, having said so."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, not {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU is visible here; use --device cpu")
    if name == "cpu" and not interpreting():
        command = [sys.executable, "-m", "tilestack", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    return torch.device(name)


def pick_operators(names: list[str] | None) -> list["Operator"]:
    from tilestack import ops

    return [ops.operator_named(name) for name in names] if names else ops.operators()


def pick_dtypes(text: str | None) -> list["torch.dtype"] | None:
    import torch

    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    if text is None:
        return None
    if unknown := [name for name in text.split(",") if name not in known]:
        raise ValueError(f"no dtype {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def load_files(paths: Iterable[Path] | None) -> None:
    for path in paths or ():
        if not path.is_file():
            raise FileNotFoundError(f"no file {path} to load")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is not a Python file")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def write_json(target: Path | None, rows: Any) -> None:
    if target is None:
        return
    text = json.dumps(rows, indent=1)
    if str(target) == "-":
        print(text)
    else:
        write_text(target, text + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def ops_command(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = None,
) -> None:
    """List every operator, its backends, and what [bold]auto[/bold] takes on this machine."""
    from tilestack.lab.catalogue import catalogue, render

    rows = catalogue(pick_device(device))
    if json_:
        print(json.dumps(rows, indent=1))
    else:
        console.print(render(rows))


def verify_command(
    operators: Operators = None,
    device: Device = None,
    backend: Backend = None,
    dtype: Dtypes = None,
    quick: Annotated[bool, typer.Option(help="Only plain layouts and values, for a first look.")] = False,
    large: Annotated[bool, typer.Option(help="Also the large shapes that bench measures.")] = False,
    json_: JsonFile = None,
    load: Load = None,
) -> None:
    """Prove implementations right against the float64 definition; exit 1 if one is wrong, naming the case.

    Every backend, case, memory layout, dtype and direction is tried. TILESTACK_BACKEND narrows it to one backend.
    """
    place = pick_device(device)
    from tilestack.lab import verify

    load_files(load)
    chosen = pick_operators(operators)
    only = verify.chosen_backends(chosen, place, backend)
    kinds = ("check", "bench") if large else ("check",)
    claims = verify.claims(chosen, place, only=only, dtypes=pick_dtypes(dtype), kinds=kinds, every_variant=not quick)
    proofs = prove_all(claims)
    write_json(json_, [asdict(proof) for proof in proofs])
    if str(json_) != "-":
        console.print(verify.render(proofs, place))
    if any(proof.ok is False for proof in proofs):
        raise typer.Exit(1)


def prove_all(claims: Iterable["Claim"]) -> list["Proof"]:
    from tilestack.lab.verify import prove

    listed = list(claims)
    with progress_bar() as progress:
        return [prove(claim) for claim in progress.track(listed, description="verifying")]


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
            help="Merge the rows into results/<machine>/kernels.json as they come; on a GPU, renew the table that auto reads.",
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
    are timed on the CPU, and the tables say so. `bench memory` sweeps access patterns, `bench optim` times optimizers, `bench train` whole
    training steps beside transformers and Liger.
    """
    place = pick_device(device)
    from tilestack.lab import bench, machine, results
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
    rows = bench.bench(
        pick_operators(operators),
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
        if place.type == "cuda":
            console.print(f"auto reads {preferences.write_table(results.load(target))}")


def bench_memory_patterns(place: "torch.device", save: bool) -> None:
    """Bandwidth against stride, row length, alignment and gathered rows, as tables and a page of plots."""
    from tilestack.lab import memory, results

    page = Path("runs/memory.html")
    points = memory.bench_memory(place.type, results.FOLDER if save else None, page, Console(stderr=True))
    for table in memory.tables(points):
        console.print(table)
    console.print(f"plots in {page}")


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
    from tilestack.cli.train import find_recipe
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


def explain_command(
    operators: Operators = None,
    target: Annotated[
        str, typer.Option(help="The GPU to compile for: sm_80, sm_90 or sm_100. It need not be here.")
    ] = "sm_90",
    dtype: Dtypes = "bfloat16",
    quick: Annotated[bool, typer.Option(help="A few telling cases instead of every bench case.")] = False,
    ptx: Annotated[
        Path | None, typer.Option(help="Write each kernel's PTX into this folder.", show_default=False)
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Show what the compiler makes of each kernel: registers, spills, shared memory, instructions. Needs no GPU."""
    from tilestack.lab.explain import explain, render_explain

    if target not in ("sm_80", "sm_90", "sm_100"):
        raise ValueError(f"target must be sm_80, sm_90 or sm_100, not {target!r}")
    reports = explain(operators or (), int(target.removeprefix("sm_")), pick_dtypes(dtype) or (), every_bench=not quick)
    write_json(json_, [report.row() for report in reports])
    for number, report in enumerate(reports if ptx else ()):
        assert ptx is not None
        write_text(ptx / f"{number:02d}_{report.kernel}.ptx", report.ptx)
    if str(json_) != "-":
        console.print(render_explain(reports))


def report_command(
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/report.html"),
    proofs: Annotated[Path | None, typer.Option(help="Proofs saved by `verify --json`.", show_default=False)] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Instead, renew the tables and figures in README and docs from results/.")
    ] = False,
) -> None:
    """Write one self-contained page: roofline, peers, proofs and the machine, from results/."""
    from tilestack.lab import figures, machine, measured, report
    from tilestack.lab.tables import update_tables

    root = Path.cwd()
    if tables:
        changed = [*update_tables(root), *figures.update_figures(root)]
        console.print("\n".join(f"renewed {path}" for path in changed) or "tables and figures are up to date")
        return
    found = json.loads(proofs.read_text()) if proofs else []
    path = report.write_report(output, measured.results_under(root / "results"), found, machine.stamp())
    console.print(f"wrote {path}")


def demo_command(
    output: Annotated[Path, typer.Option(help="Where to put what the demo makes.")] = Path("runs/demo"),
) -> None:
    """Show the whole stack on this machine in a few minutes: doctor, proofs, measurements, a model trained, a report."""
    place = pick_device(None)
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


def doctor_command(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Look at this machine: what will run, what will not, and how to fix it."""
    from tilestack.lab import machine

    findings = machine.doctor()
    if json_:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console.print(machine.render(findings))
