"""The commands for several GPUs: which layout a model could have on them, and how fast they talk to each other."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tilestack.cli.common import Device, JsonFile, console, write_json
from tilestack.cli.recipes import find_recipe
from tilestack.cli.train import Set
from tilestack.lab.units import in_bytes
from tilestack.parallel import environment

if TYPE_CHECKING:
    from tilestack.lab.planning.comm import CollectiveTime
    from tilestack.lab.planning.plan import Plan
    from tilestack.lab.planning.plan_costs import Cluster
    from tilestack.train import Recipe


def add_to(app: typer.Typer) -> None:
    app.command("plan")(plan_command)
    app.command("comm")(comm_command)


def plan_command(
    model: Annotated[str, typer.Argument(help="A recipe, as a file or by name, or a model: a folder, a .gguf file, or smollm2.", show_default=False)],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", min=1, max=65536, show_default=False)],
    memory: Annotated[float, typer.Option(help="Memory of a GPU in GB (10^9 bytes); leave some for CUDA and NCCL.")] = 141,
    sequence: Annotated[int | None, typer.Option(help="Tokens in a row; default: the recipe's.", min=2, show_default=False)] = None,
    batch: Annotated[int | None, typer.Option(help="Rows in a micro-batch; default: the recipe's.", min=1, show_default=False)] = None,
    set_: Set = None,
    peak: Annotated[float, typer.Option(help="TFLOP/s of a GPU.")] = 989,
    efficiency: Annotated[float, typer.Option(help="Share of the peak that a step reaches.")] = 0.4,
    bandwidth: Annotated[float, typer.Option(help="GB/s that a GPU sends to others of its machine.")] = 450,
    network: Annotated[float, typer.Option(help="GB/s that a GPU sends to other machines.")] = 50,
    node: Annotated[int, typer.Option(help="GPUs in a machine.", min=1)] = 8,
    top: Annotated[int, typer.Option(help="Layouts to show; 0 shows all.", min=0)] = 10,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """Plan a training run on several GPUs: memory, communication and estimated time of every possible layout.

    A step has as many rows in every layout, data.batch times data.accumulate times GPUs. Nothing is loaded or run, so any
    machine can plan for any other.

    [bold]tilestack plan llama-1b --gpus 8[/bold]
    """
    from tilestack.lab.planning.plan import plans
    from tilestack.lab.planning.plan_costs import Cluster, Workload

    recipe = recipe_or_model(model, [
        *([f"data.sequence={sequence}"] if sequence else []), *([f"data.batch={batch}"] if batch else []), *(set_ or ()),
    ])  # fmt: skip
    cluster = Cluster(gpus, memory * 1e9, peak * 1e12, efficiency, bandwidth * 1e9, network * 1e9, node)
    work = Workload(recipe)
    found = plans(work, cluster)
    write_json(json_, [plan.as_dict() for plan in found])
    if str(json_) == "-":
        return
    size = sum(parameter.numel() for parameter in work.model.parameters())
    shown = found[: top or None]
    console.print(plan_table(shown))
    fitting, rows = sum(plan.fits for plan in found), recipe.data.batch
    console.print(
        f"{count_in_words(size)} parameters in {recipe.precision.parameters}, {recipe.optimizer.name}; {rows} row{'s' * (rows > 1)} of "
        f"{recipe.data.sequence:,} tokens in a micro-batch, {recipe.data.accumulate * gpus} micro-batches in a step. "
        f"{fitting} of {len(found)} layouts fit into {gpus} times {memory:g} GB.",
        highlight=False,
    )
    console.print(assumptions(cluster), highlight=False)


def comm_command(
    collectives: Annotated[list[str] | None, typer.Argument(help="all_reduce, all_gather, reduce_scatter, all_to_all, all_to_all_uneven or send_recv; default: all.", show_default=False)] = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes to start; default: one per GPU, 2 without one.", min=1, max=1024, show_default=False)] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of the larger buffer, comma-separated, with K, M or G.")] = "64K,1M,16M",
    repeats: Annotated[int, typer.Option(help="Calls to take the mean of.", min=1)] = 20,
    device: Device = None,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """Measure collectives between processes: time, algorithm and bus bandwidth as nccl-tests define them.

    Each result is checked before it is timed. GPUs talk by NCCL, CPUs by gloo. For several machines, start it with torchrun
    instead of --processes: `torchrun … -m tilestack comm`.
    """
    from tilestack.device import pick_device
    from tilestack.lab.planning import comm

    names = comm.collectives_named(collectives or [])
    wanted = [comm.bytes_of_size(size) for size in sizes.split(",")]
    place = pick_device(device)
    if not environment.launched():
        number = processes or default_processes(place.type)
        if number == 1:
            what = "GPU" if place.type == "cuda" else "process"
            console.print(f"there is one {what} alone, which has nobody to talk to; see --processes and --device")
            return
        from tilestack.parallel.launch import launch

        refuse_too_many(number, place.type)
        given = ["--sizes", sizes, "--repeats", str(repeats), "--device", place.type]
        raise typer.Exit(launch(number, ["comm", *names, *given, *(["--json", str(json_)] if json_ else [])]))
    import torch.distributed as dist

    from tilestack.parallel.processes import joined

    with joined(place.type) as mesh:
        assert dist.group.WORLD is not None
        found = list(comm.measure_collectives(names, wanted, repeats, dist.group.WORLD, place))
        if mesh.first:
            write_json(json_, [asdict(row) for row in found])
            if str(json_) != "-":
                console.print(comm_table(found))
                by = "NCCL" if place.type == "cuda" else "gloo"
                console.print(
                    f"{mesh.world} processes by {by}, {repeats} calls each; every result was right", highlight=False
                )


def default_processes(kind: str) -> int:
    import torch

    return torch.cuda.device_count() if kind == "cuda" else 2


def refuse_too_many(processes: int, kind: str) -> None:
    import torch

    if kind == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"--processes {processes} needs as many GPUs, and there are {torch.cuda.device_count()}; --device cpu needs none"
        )


def comm_table(found: list["CollectiveTime"]) -> Table:
    made = Table("collective", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("bytes", "time", "algorithm bandwidth", "bus bandwidth"):
        made.add_column(name, justify="right")
    for row in found:
        rates = (f"{rate / 1e9:.3f} GB/s" for rate in (row.algorithm_bandwidth, row.bus_bandwidth))
        made.add_row(row.collective, f"{row.bytes:,}", in_seconds(row.seconds), *rates)
    return made


def recipe_or_model(name: str, changes: list[str]) -> "Recipe":
    """The recipe of that name, or one that trains the model of that name as most are: bfloat16 with float32 masters."""
    from tilestack.cli.recipe_keys import recipe_kinds
    from tilestack.models.checkpoints import PACKAGED, config_of
    from tilestack.train import Recipe
    from tilestack.train.settings import RecipeError, override, read

    if Path(name).is_dir() or Path(name).suffix == ".gguf" or name in PACKAGED:
        precision = {"parameters": "bfloat16", "compute": "bfloat16", "updates": "master"}
        sequence = min(config_of(name).positions, 4096)
        table = {"model": {"path": name}, "precision": precision, "data": {"sequence": sequence, "batch": 1}}
        for change in changes:
            override(table, change)
        return read(Recipe, table)
    path, problems = find_recipe(Path(name)), []
    for kind in recipe_kinds().values():
        try:
            return kind.load(path, changes)
        except RecipeError as problem:
            problems.append(problem)
    raise problems[0]


def plan_table(found: list["Plan"]) -> Table:
    """A line a layout, no wider than a terminal: where that is narrow, layouts take two lines and numbers stay whole. `--json`
    has every part of what is added up here."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column("layout")
    for name in ("state", "activations", "memory", "fits", "sends", "step"):
        made.add_column(name, justify="right", no_wrap=True)
    for plan in found:
        activations = plan.activations_checkpointed if plan.checkpointing else plan.activations
        made.add_row(
            escape(layout_in_words(plan)), in_bytes(plan.weights + plan.gradients + plan.optimizer), in_bytes(activations),
            in_bytes(plan.memory), ("checkpointed" if plan.checkpointing else "yes") if plan.fits else "no",
            in_bytes(sum(plan.communication.values())) if plan.communication else "nothing", in_seconds(plan.step),
        )  # fmt: skip
    return made


def layout_in_words(plan: "Plan") -> str:
    """The sides of a layout that are more than 1, as a recipe names them."""
    layout = plan.layout
    sides = {"data": layout.data, layout.method or "context": layout.context, "tensor": layout.tensor}
    sides["pipeline"] = layout.pipeline
    named = " × ".join(f"{name} {size}" for name, size in sides.items() if size > 1) or "one GPU"
    named += f", expert {layout.expert}" if layout.expert > 1 else ""
    return f"{named}, shard" if layout.shard else named


def assumptions(cluster: "Cluster") -> str:
    return (
        "Bytes are of the GPU that has most: state is weights, gradients and the optimizer's, sends are a step's. The step is an estimate: arithmetic at "
        f"{cluster.efficiency:.0%} of {cluster.peak / 1e12:g} TFLOP/s, times 1 + (pipeline - 1) / micro-batches or half of that interleaved, + what tensor, heads, "
        f"expert and pipeline send at {cluster.bandwidth / 1e9:g} GB/s in a machine of {cluster.node} and {cluster.network / 1e9:g} GB/s "
        "between machines, + what ring sends beyond attention, and data, copies and shard beyond the arithmetic, that hide it."
    )


def count_in_words(count: int) -> str:
    """A number of parameters in units of which it has at least one."""
    unit, factor = ("G", 1e9) if count >= 1e9 else ("M", 1e6) if count >= 1e6 else ("k", 1e3)
    return f"{count / factor:,.2f} {unit}"


def in_seconds(seconds: float) -> str:
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * factor:.3g} {unit}"
