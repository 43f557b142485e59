"""The commands that train: a recipe in, a run folder out; and the proof that backends train alike."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from tilestack.cli import recipe_keys
from tilestack.cli.common import JsonFile, console, kernel_device, share_the_cores, writable_file, write_json
from tilestack.cli.recipes import find_recipe
from tilestack.parallel import environment
from tilestack.shipped import shipped

if TYPE_CHECKING:
    from tilestack.lab.parity import Parity
    from tilestack.train import Recipe


def recipe_argument(example: str) -> Any:
    """The recipe of a command, a file or a name; the example is one that the command can follow."""
    return typer.Argument(
        help=f"A recipe: a TOML file, or the name of one that comes with tilestack, such as {example}.",
        callback=find_recipe,  # so that a misspelt name is known before PyTorch is loaded
        show_default=False,
    )


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change the recipe: section.key=value, as often as needed. `tilestack recipe` lists the keys.",
        show_default=False,
    ),
]
Folder = Annotated[Path | None, typer.Option(help="The run's folder; default: runs/<run.name>.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder and start over.")]
Profile = Annotated[
    int, typer.Option(help="Profile this many steps, after the first four: trace and kernel times in <folder>/profile.", min=0, show_default=False)
]  # fmt: skip

Processes = Annotated[
    int, typer.Option(help="Start this many processes on this machine, one per GPU, which train as one; the recipe's section parallel says how.", min=1, show_default=False)
]  # fmt: skip


def add_to(app: typer.Typer) -> None:
    app.command("train")(train_command)
    app.command("parity")(parity_command)
    app.command("chain")(chain_command)
    recipe_keys.add_to(app)


def train_command(
    recipe: Annotated[Path, recipe_argument("demo")],
    set_: Set = None,
    folder: Folder = None,
    fresh: Fresh = False,
    profile: Profile = 0,
    processes: Processes = 1,
) -> None:
    """Pretrain a model from a recipe; the result is <folder>/model, in transformers' format.

    After an interruption, the same command resumes bit-exactly from the last checkpoint. The folder holds the full
    recipe, run.json (how it was made), metrics.jsonl, speed.jsonl, loss.html, checkpoints and, at the end, the model.

    On a GPU steps run as CUDA graphs where possible (run.graph). On several GPUs, start it with --processes, or on several
    machines with torchrun: `torchrun … -m tilestack train …`.

    All recipe keys: [bold]tilestack recipe[/bold].
    """
    share_the_cores()
    from tilestack.train import Recipe
    from tilestack.train.pretrain import pretrain

    if processes > 1:
        launch_command("train", Recipe, processes, recipe, set_, folder, fresh, profile)
    follow_recipe(Recipe, pretrain, recipe, set_, folder, fresh, profile)


def launch_command(
    command: str,
    kind: "type[Recipe]",
    processes: int,
    recipe: Path,
    set_: list[str] | None,
    folder: Path | None,
    fresh: bool,
    profile: int,
) -> NoReturn:
    """Run the same command in several processes, and end as they do."""
    from tilestack.parallel.launch import launch
    from tilestack.parallel.mesh import Layout
    from tilestack.train.errors import AFTER_A_LOSS

    if environment.launched():
        raise ValueError(f"torchrun has started {environment.world()} processes; leave --processes {processes} out")
    sides = read_recipe(kind, recipe, set_).parallel  # once here, for one error instead of many
    grid = dict(tensor=sides.tensor, context=sides.context, pipeline=sides.pipeline, expert=sides.expert)
    Layout.fit(processes, **grid)
    arguments = [command, str(recipe), *(part for assignment in set_ or () for part in ("--set", assignment))]
    arguments += ["--folder", str(folder)] if folder else []
    arguments += ["--fresh"] if fresh else []
    arguments += ["--profile", str(profile)] if profile else []
    debug = ["--debug"] if "--debug" in sys.argv else []
    raise typer.Exit(launch(processes, [*debug, *arguments], AFTER_A_LOSS))


def read_recipe(kind: "type[Recipe]", recipe: Path, set_: list[str] | None) -> "Recipe":
    """A recipe as the command line changes it; an error says whose it is, if it is another command's."""
    from tilestack.train.settings import RecipeError

    try:
        return kind.load(recipe, set_ or ())
    except RecipeError as problem:
        if environment.rank():  # the first process says it for all
            raise typer.Exit(1) from problem
        raise RecipeError(f"{problem}{whose(recipe, kind)}") from problem


def follow_recipe(
    kind: "type[Recipe]",
    train: Callable[..., dict[str, float]],
    recipe: Path,
    set_: list[str] | None,
    folder: Path | None,
    fresh: bool,
    profile: int,
) -> None:
    """Read a recipe, train as it says, and print the figures; a run that was asked to stop ends with the signal's code."""
    from tilestack.lab import machine
    from tilestack.train.errors import Interrupted

    read = read_recipe(kind, recipe, set_)
    place = folder or Path("runs") / read.run.name
    said = Console(stderr=True)
    try:
        figures = train(read, place, fresh=fresh, profile=profile, provenance=machine.stamp(), console=said)
    except Interrupted as stopped:
        if not environment.rank():
            said.print(escape(str(stopped)), highlight=False, soft_wrap=True)
        raise typer.Exit(stopped.code) from None
    if not environment.rank():
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float))
        console.print(escape(f"{place}: {shown}"), highlight=False)


def whose(recipe: Path, kind: "type[Recipe]") -> str:
    """Where a recipe is none of this command's but of another's: which, in words that follow an error."""
    from tilestack.train.settings import RecipeError

    fitting = []
    for command, other in recipe_keys.recipe_kinds().items():
        try:
            other.load(recipe)
        except RecipeError:
            continue
        if other is kind:  # the recipe is right, and what was set on the command line is not
            return ""
        fitting.append(command)
    # sft.toml is for sft, though grpo reads it.
    meant = [command for command in fitting if command == recipe.stem] or fitting
    name = recipe.stem if recipe.parent == shipped("recipes") else recipe
    commands = " or ".join(f"`tilestack {command} {name}`" for command in meant)
    return f". This is a recipe of another command: {commands}" if meant else ""


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
    output: Annotated[Path, typer.Option(help="The page with the curves.", callback=writable_file)] = Path("runs/parity.html"),
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
    import tempfile

    from tilestack import ops
    from tilestack.data.prepared import prepare_tokens
    from tilestack.extras import MissingExtra
    from tilestack.lab.curves import gap_over_starts
    from tilestack.lab.parity import chosen_backend, fp8_parity, new_model, parity
    from tilestack.train import Recipe
    from tilestack.train.pretrain import Pretraining

    for operator in swap or ():
        ops.operator_named(operator)  # a misspelt one is better known before four models are trained
    chosen_backend(backend, swap or ())  # and so is a backend that they lack
    if fp8 and swap:
        raise ValueError("--fp8 and --swap are two comparisons; ask for one of them")
    if starts > 1 and not fp8:
        raise ValueError(
            "--starts is for --fp8: kernels that are right part from the definitions by their rounding alone"
        )
    on_gpu = place.type == "cuda"
    name = recipe or Path("pretrain-100m" if on_gpu else "parity-fp8" if fp8 else "parity")
    # The definitions keep every score of attention, so they are given a smaller batch than training would take, and with
    # it smaller steps: where the loss leaps about, equally right runs part, and the bound would say nothing.
    smaller = ["data.batch=8", "data.most_bytes=8000000", "optimizer.lr=1e-4"] if on_gpu and recipe is None else []
    settings = [f"run.device={place.type}", "run.compile=off", *smaller, *(set_ or ())]
    read = Recipe.load(find_recipe(name), settings)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, tokens = prepare_tokens(read.data, Path(scratch), tokenizer_of=read.model.path)
        objective = Pretraining(read, tokenizer, tokens, place)
        build = lambda: new_model(read, tokenizer.vocabulary)
        say = lambda words: Console(stderr=True).print(f"training on {words}", highlight=False)
        if fp8:
            found = fp8_parity(read, build, objective, steps or 300, starts, say)
        else:
            found = parity(read, build, objective, steps or (100 if on_gpu else 5), backend, swap or (), say)
    write_json(json_, found.as_dict())
    if save:
        from tilestack.lab import curves, machine, results

        trained = f"{name}, batches of {read.data.batch} x {read.data.sequence} tokens, lr {read.optimizer.lr:g}, {len(found.reference)} steps, {read.precision.compute}"  # fmt: skip
        # What fp8 is held against is the recipe itself, so that runs of several are kept beside each other.
        kept, file = (found.as_dict() | {"name": trained}, "fp8") if fp8 else (found.as_dict(), "curves")
        curves.merge(results.FOLDER, machine.stamp(place.type), trained, kept, file)
    try:
        page = f"curves in {write_parity_page(output, found, str(name))}"
    except MissingExtra as missing:
        page = escape(f"no page, since {missing}")
    if str(json_) != "-":
        verdict = f"[green]agrees[/green] over {len(found.reference)} steps" if found.broken_at is None else f"[red]parts at step {found.broken_at}[/red]"  # fmt: skip
        if starts > 1:
            above, apart = gap_over_starts(found.ends)
            console.print(f"{found.name} ends above {found.against} by {above}, whose own ends have a spread of {apart}", highlight=False)  # fmt: skip
        console.print(f"{found.name}: {verdict}; largest difference {max(found.differences):.3g}, {found.worst:.0%} of what is allowed; {page}", highlight=False)  # fmt: skip
    if found.broken_at is not None:
        raise typer.Exit(1)


def chain_command(
    folder: Annotated[
        Path | None,
        typer.Option(help="Output folder, with a folder per run.", show_default="runs/chain or runs/alignment"),
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

    from tilestack.lab import chain, machine, results

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
        console.print(f"kept in {chain.save(results.FOLDER, machine.stamp(device), found, name)}", highlight=False)


def write_parity_page(path: Path, found: "Parity", model: str) -> Path:
    """The two curves, and their difference under its bound."""
    from tilestack.lab import machine
    from tilestack.lab.page import Section, colour, plot, write_page

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
