"""The commands for several GPUs: which layout a model could have on them, and how fast they talk to each other."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tilestack.cli.common import JsonFile, console, write_json
from tilestack.cli.recipes import find_recipe
from tilestack.cli.train import Set

if TYPE_CHECKING:
    from tilestack.lab.plan import Plan
    from tilestack.lab.plan_costs import Cluster
    from tilestack.train import Recipe


def add_to(app: typer.Typer) -> None:
    app.command("plan")(plan_command)


def plan_command(
    model: Annotated[str, typer.Argument(help="A recipe, as a file or by name, or the folder of a model.", show_default=False)],
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

    A step has as many rows in every layout: micro-batches times data.accumulate times GPUs, as data parallelism alone has
    them. Nothing is loaded or run, so any machine can plan for any other.

    [bold]tilestack plan llama-1b --gpus 8[/bold]
    """
    from tilestack.lab.plan import plans
    from tilestack.lab.plan_costs import Cluster, Workload

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
    console.print(plan_table(found[: top or None]))
    fitting = sum(plan.fits for plan in found)
    console.print(
        f"{size / 1e9:,.2f} G parameters in {recipe.precision.parameters}, {recipe.optimizer.name}; {recipe.data.batch} rows of "
        f"{recipe.data.sequence:,} tokens in a micro-batch, {recipe.data.accumulate * gpus} micro-batches in a step. "
        f"{fitting} of {len(found)} layouts fit into {gpus} times {memory:g} GB.",
        highlight=False,
    )
    console.print(assumptions(cluster), highlight=False)


def recipe_or_model(name: str, changes: list[str]) -> "Recipe":
    """The recipe of that name, or one that trains the model in that folder as most are: bfloat16 with float32 masters."""
    from tilestack.cli.recipe_keys import recipe_kinds
    from tilestack.train import Recipe
    from tilestack.train.settings import RecipeError, override, read

    if Path(name).is_dir():
        precision = {"parameters": "bfloat16", "compute": "bfloat16", "updates": "master"}
        table = {"model": {"path": name}, "precision": precision, "data": {"sequence": 4096, "batch": 1}}
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
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    sides = ("data", "shard", "context", "tensor", "pipeline")
    for name in (
        *sides,
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "checkpointed",
        "memory",
        "fits",
        "sends",
        "step",
    ):
        made.add_column(name, justify="right")
    for plan in found:
        layout = plan.layout
        context = f"{layout.context} {layout.method}".strip()
        fits = ("with checkpointing" if plan.checkpointing else "yes") if plan.fits else "no"
        sends = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in plan.communication.items()) or "nothing"
        made.add_row(
            str(layout.data), "yes" if layout.shard else "", context, str(layout.tensor), str(layout.pipeline),
            in_bytes(plan.weights), in_bytes(plan.gradients), in_bytes(plan.optimizer), in_bytes(plan.activations),
            in_bytes(plan.activations_checkpointed), in_bytes(plan.memory), fits, escape(sends), in_seconds(plan.step),
        )  # fmt: skip
    return made


def assumptions(cluster: "Cluster") -> str:
    return (
        "Bytes are of the GPU that has most; sends are its bytes in a step. The step is an estimate: arithmetic at "
        f"{cluster.efficiency:.0%} of {cluster.peak / 1e12:g} TFLOP/s, times 1 + (stages - 1) / micro-batches, + what tensor, heads "
        f"and pipeline send at {cluster.bandwidth / 1e9:g} GB/s in a machine of {cluster.node} and {cluster.network / 1e9:g} GB/s "
        "between machines, + what ring sends beyond attention, and data and shard beyond the arithmetic, that hide it."
    )


def in_bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )
