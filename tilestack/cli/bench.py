"""`tilestack bench`: kernels, access patterns, the host's time and optimizers, measured; of models, see bench_models.py."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape

from tilestack.cli import bench_models
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
    refuse_ignored_options,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from tilestack.contract.operator import Operator

RUN = ("device", "save", "stale", "budget", "load")
OF_OPERATORS = (*RUN, "json", "backend", "dtype", "direction", "case", "jobs")
# What is measured besides operators, and the options that each part reads; "all" hands them to whichever does.
PARTS = {
    "memory": RUN,
    "host": (*RUN, "json", "jobs"),
    "optim": (*RUN, "json", "dtype", "case"),
    "layers": (*RUN, "json", "backend", "dtype", "direction", "recipe", "micro_batch", "sequence"),
    "train": (*RUN, "json", "backend", "dtype", "recipe", "micro_batch", "sequence"),
    "serve": (*RUN, "json", "backend", "model", "workload"),
    "http": (*RUN, "json", "model"),
    "quantize": (*RUN, "json", "model"),
    "startup": ("json",),
    "all": None,
}


def add_to(app: typer.Typer) -> None:
    app.command("bench")(bench_command)


def bench_command(
    context: typer.Context,
    operators: Operators = None,
    device: Device = None,
    backend: Annotated[str | None, typer.Option(help="Comma-separated backends and peers (aten, aten-rowwise, compile, compile-max, eager, liger); bench serve: engines (tilestack, tilestack int8, tilestack lookup, tilestack operators, tilestack fp8 kv, tilestack fp8 weights, vllm, transformers); default: all that can run.", show_default=False)] = None,
    dtype: Dtypes = None,
    direction: Annotated[str | None, typer.Option(help="Comma-separated: forward, backward, both; default: forward,backward, of layers forward,both.", show_default=False)] = None,
    case: Annotated[str, typer.Option(help="bench, check, or the name of one case, which `tilestack ops NAME` lists.")] = "bench",
    save: Annotated[bool, typer.Option("--save", help="Merge the rows into results/<machine>/ as they are measured; on a GPU, in a checkout, also update the table that auto reads.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Only what has no up-to-date result in results/.")] = False,
    budget: Annotated[float | None, typer.Option(help="Start nothing that would end after this many seconds.", min=1, show_default=False)] = None,
    jobs: Annotated[int, typer.Option(help="Operators and host, on a GPU: processes that compile kernels before they are timed in one; of operators, at most two fifths of the budget.", min=1)] = 1,
    json_: JsonFile = None,
    load: Load = None,
    recipe: Annotated[str | None, typer.Option(help="bench train, bench layers: comma-separated recipes whose models to take; default: those of the documentation, or demo on a CPU.", show_default=False)] = None,
    micro_batch: Annotated[str | None, typer.Option(help="bench train, bench layers: comma-separated batch sizes; default: the documentation's or the recipe's.", show_default=False)] = None,
    sequence: Annotated[int | None, typer.Option(help="bench train, bench layers: sequence length; default: the recipe's.", min=2, show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="bench serve, http and quantize: a model's folder, file or name; default: random weights, on a GPU in the shape of Qwen3-0.6B; quantize: smollm2.", show_default=False)] = None,
    workload: Annotated[str | None, typer.Option(help="bench serve: comma-separated workloads, such as 'throughput,batch 1'.", show_default=False)] = None,
) -> None:  # fmt: skip
    """Benchmark kernels against the hardware roofs and the fastest peer, in one run.

    [bold]tilestack bench softmax[/bold] measures one operator; [bold]tilestack bench add --load my_kernels.py[/bold]
    also your own kernel.

    Kernel time is CUDA-graph replay on cold caches; host time is the cost of a plain call. Without a GPU the definitions
    are timed on the CPU, and the tables say so.

    `bench memory` sweeps access patterns, `bench host` times the host cost of calls, `bench optim [NAME]` optimizers,
    `bench layers [NAME]` a decoder's attention, mlp, block and head, `bench train` training steps next to transformers and Liger,
    `bench serve` the engine next to vLLM and transformers, `bench http` the overhead of HTTP, `bench quantize` the quality of
    quantised weights, `bench startup` imports and the command line. `bench all` runs all but the last two;
    `make bench` and, on a CPU, `make bench-cpu` reproduce every figure of the documentation.
    """
    first = operators[0] if operators else ""
    if (read := PARTS.get(first, OF_OPERATORS)) is not None:
        refuse_ignored_options(context, f"bench {first}" if first in PARTS else "bench of operators", read)
    if operators == ["startup"]:
        bench_starts(json_)
        return
    everything = operators == ["all"]
    if everything and (backend or dtype or direction or json_):
        raise ValueError(
            "bench all takes no --backend, --dtype, --direction or --json: they mean other things to its parts; name one"
        )
    place = kernel_device(device)
    from tilestack.lab import machine

    load_files(load)
    asked = Asked(place, machine.stamp(place.type), save, stale, budget, json_, time.monotonic())
    split = lambda text: text.split(",") if text else None
    ahead = (jobs, tuple(load or ()))
    ways = (direction or "forward,backward").split(",")
    kernels = functools.partial(bench_kernels, asked, split(dtype), ways, split(backend), case, ahead)
    training_works, layer_works = (
        functools.partial(works, place, recipe, micro_batch, sequence, dtype)
        for works in (bench_models.training_works, bench_models.layer_works)
    )
    parts: dict[str, Callable[[], None]] = {
        "memory": functools.partial(bench_memory_patterns, asked),
        "host": functools.partial(bench_host_time, asked, ahead),
        "optim": lambda: bench_optimizers(asked, (operators or [])[1:], "bench" if everything else case, split(dtype)),
        "layers": lambda: bench_models.bench_decoder_layers(
            asked, layer_works(), (operators or [])[1:], split(direction), split(backend)
        ),
        "train": lambda: bench_models.bench_training(asked, training_works(), split(backend)),
        "serve": functools.partial(bench_models.bench_serving, asked, model, split(backend), split(workload)),
        "http": functools.partial(bench_models.bench_over_http, asked, model),
    }
    if operators == ["quantize"]:  # apart from all: it is the same on every machine
        bench_models.bench_quality(asked, model)
    elif everything:
        kernels()
        for part in parts.values():
            part()
    elif operators and operators[0] in parts and (len(operators) == 1 or operators[0] in ("optim", "layers")):
        parts[operators[0]]()
    else:
        if mixed := [name for name in operators or () if name in PARTS]:
            raise ValueError(f"bench {mixed[0]} is measured by itself, without other names beside it")
        refuse_unknown_names(operators or [])
        kernels(operators)


def refuse_unknown_names(names: Sequence[str]) -> None:
    """Refuse what is no operator; the error tells what else can be measured, too."""
    from tilestack.contract import BackendError

    try:
        pick_operators(list(names))
    except BackendError as problem:
        raise ValueError(f"bench measures operators, and {', '.join(PARTS)} by these names; {problem}") from problem


@dataclass(frozen=True)
class Asked:
    """What a command asks of each part of the benchmark."""

    place: "torch.device"
    stamp: dict[str, Any]
    save: bool
    stale: bool
    budget: float | None
    json: Path | None
    began: float

    def results_file(self, name: str) -> Path:
        """Where results of a name are kept; before anything is measured, one that cannot take this machine's is refused."""
        from tilestack.lab import results

        path = results.path_of(self.stamp["slug"], name)
        if self.save:
            results.refuse_other_machine(writable_file(path), self.stamp)
        return path

    def kept_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a results file, none where there is no file."""
        from tilestack.lab import results

        path = self.results_file(name)
        return results.load(path)["rows"] if path.exists() else []

    def seconds_left(self) -> float | None:
        return None if self.budget is None else self.budget - (time.monotonic() - self.began)

    def is_over(self) -> bool:
        left = self.seconds_left()
        return left is not None and left <= 0

    @contextmanager
    def measured_rows(
        self, target: Path, render: Callable[[list[dict[str, Any]]], Any]
    ) -> Iterator[list[dict[str, Any]]]:
        """A list for rows, which are shown at the end however it comes: what Ctrl-C or an error leaves was measured."""
        rows: list[dict[str, Any]] = []
        try:
            yield rows
        finally:
            write_json(self.json, rows)
            if rows and str(self.json) != "-":
                console.print(render(rows))
            if rows and self.save:
                console.print(f"saved in {target}")

    def measure(
        self,
        name: str,
        render: Callable[[list[dict[str, Any]]], Any],
        measured: Iterable[list[dict[str, Any]]],
        with_roofs: bool = True,
        same: Sequence[str] = (),
    ) -> None:
        """Take rows as they are measured until the budget is over; they are saved at once, since the next may fail."""
        from tilestack.lab import results
        from tilestack.lab.bench.roofs import measure_roofs

        target, left = self.results_file(name), iter(measured)
        with self.measured_rows(target, render) as rows:
            while not self.is_over() and (found := next(left, None)) is not None:
                rows += found
                if self.save:
                    roofs = measure_roofs(self.place.type).as_dict() if with_roofs else {}
                    results.merge(target, self.stamp, roofs, found, same)


def bench_kernels(
    asked: Asked,
    dtypes: list[str] | None,
    directions: list[str],
    backends: list[str] | None,
    case: str,
    ahead: tuple[int, Sequence[Path]],
    operators: list[str] | None = None,
) -> None:
    """Operators and their peers, compiled ahead in so many processes, which run some files first."""
    from tilestack.lab import results
    from tilestack.lab.bench import terminal_tables
    from tilestack.lab.bench.operators import bench_operators
    from tilestack.shipped import checkout
    from tilestack.tuning import preferences

    chosen = pick_operators(operators)
    check_candidates(backends or [], chosen)
    target = asked.results_file("kernels") if asked.save else None
    rows = bench_operators(
        chosen,
        dtypes,
        directions,
        backends,
        case,
        asked.place,
        target,
        Console(stderr=True),
        asked.kept_rows("kernels") if asked.stale else None,
        asked.seconds_left(),
        *ahead,
    )
    write_json(asked.json, [row.as_dict() for row in rows])
    if str(asked.json) != "-":
        for table in terminal_tables.render_rows(rows, asked.stamp):
            console.print(table)
    if target is not None and rows:
        console.print(f"saved in {target}")
        if asked.place.type == "cuda" and checkout():  # an installed package is not ours to write into
            cases = {(row.op, row.case, row.dtype) for row in rows}
            console.print(f"auto reads {preferences.write_table(results.load(target), cases=cases)}")


def check_candidates(names: list[str], operators: list["Operator"]) -> None:
    """Refuse a name that is no backend of any of the operators and no peer."""
    from tilestack.lab.bench.peers import OF_OPERATORS

    known = sorted({*OF_OPERATORS, *(name for operator in operators for name in operator.implementations)})
    if unknown := [name for name in names if name not in known]:
        what = operators[0].name if len(operators) == 1 else "these operators"
        has = "has" if len(operators) == 1 else "have"
        raise ValueError(f"no backend or peer is named {', '.join(unknown)}; {what} {has} {', '.join(known)}")


def bench_starts(json_: Path | None) -> None:
    """How long imports and the command line take before anything happens."""
    from tilestack.lab.bench import startup

    found = startup.bench_startup(startup.STARTS)
    write_json(json_, [asdict(start) for start in found])
    if str(json_) != "-":
        console.print(startup.render_starts(found))


def bench_memory_patterns(asked: Asked) -> None:
    """Bandwidth against stride, row length, alignment and gathered rows, as tables and, saved, a page of plots."""
    from tilestack.extras import MissingExtra
    from tilestack.lab import results
    from tilestack.lab.bench import memory_sweeps

    kept = memory_sweeps.load_sweeps(results.FOLDER, asked.stamp["slug"])
    if asked.is_over() or (asked.stale and kept and memory_sweeps.sweeps_are_current(kept)):
        return
    run = memory_sweeps.bench_memory(asked.place.type, results.FOLDER if asked.save else None, Console(stderr=True))
    for table in memory_sweeps.sweep_tables(memory_sweeps.points_of(run)):
        console.print(table)
    if not asked.save:
        return
    try:
        console.print(f"plots in {memory_sweeps.write_sweeps_page(run, Path('runs/memory.html'))}")
    except MissingExtra as missing:
        console.print(escape(f"no page of plots, since {missing}"), soft_wrap=True)


def bench_host_time(asked: Asked, ahead: tuple[int, Sequence[Path]]) -> None:
    """What a call of each operator costs on the host; compiled ahead as the operators are."""
    from tilestack.lab.bench import host_time

    if asked.is_over():
        return
    name = "sweeps/host"
    kept = host_time.current_operators(asked.kept_rows(name)) if asked.stale else set()
    measured = host_time.bench_host(asked.place.type, kept, *ahead)
    asked.measure(name, host_time.render_host_times_with_summary, measured, with_roofs=False, same=host_time.SAME)


def bench_optimizers(asked: Asked, names: list[str], case: str, dtypes: list[str] | None) -> None:
    """The step of each optimizer, or of those named, beside torch's; on a CPU, over a few small tensors."""
    from tilestack.lab.bench import terminal_tables
    from tilestack.lab.bench.optimizer_steps import CASES, CONTESTS, DTYPES, bench_optim, refuse_unknown_optimizers
    from tilestack.lab.rows import Row

    chosen = names or list(CONTESTS), list(CASES) if case in ("bench", "check") else [case], dtypes or DTYPES
    refuse_unknown_optimizers(*chosen)
    few: list[tuple[int, ...]] = [(256, 64)] * 8
    small = None if asked.place.type == "cuda" else dict.fromkeys(CASES, few)
    kept = asked.kept_rows("optimizers") if asked.stale else []
    measured = bench_optim(*chosen, device=asked.place.type, shapes=small, kept=kept)
    render = lambda rows: Group(*terminal_tables.render_rows([Row.from_dict(row) for row in rows], asked.stamp))
    asked.measure("optimizers", render, measured)
