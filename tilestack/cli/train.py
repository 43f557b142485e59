"""The commands that train by a recipe: `train`, `sft`, `dpo`, `kto` and `grpo`. A recipe in, a run folder out."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from tilestack.cli.common import console, in_home, share_the_cores
from tilestack.cli.recipe_keys import recipe_kinds
from tilestack.cli.recipes import find_recipe
from tilestack.parallel import environment
from tilestack.shipped import shipped

if TYPE_CHECKING:
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
Folder = Annotated[
    Path | None, typer.Option(help="The run's folder; default: runs/<run.name>.", callback=in_home, show_default=False)
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder and start over.")]
Profile = Annotated[
    int, typer.Option(help="Profile this many steps, after the first four: trace and kernel times in <folder>/profile.", min=0, show_default=False)
]  # fmt: skip

Processes = Annotated[
    int, typer.Option(help="Start this many processes on this machine, one per GPU, which train as one; the recipe's section parallel says how.", min=1, show_default=False)
]  # fmt: skip

COMMANDS = {
    "train": """Pretrain a model from a recipe; the result is <folder>/model, in transformers' format.

    After an interruption, the same command resumes bit-exactly from the last checkpoint. The folder holds the full
    recipe, run.json (how it was made), metrics.jsonl, speed.jsonl, loss.html, checkpoints and, at the end, the model.

    On a GPU steps run as CUDA graphs where possible (run.graph). On several GPUs, start it with --processes, or on several
    machines with torchrun: `torchrun … -m tilestack train …`.

    All recipe keys: [bold]tilestack recipe[/bold].
    """,
    "sft": """Fine-tune on conversations, training only on the assistant's answers; with lora.rank, only adapters.

    data.files are rows of {"messages": …}, or in the formats of ShareGPT and Alpaca.
    Run folder, resume and --processes work as in [bold]train[/bold].
    """,
    "dpo": """Preference optimisation (DPO, IPO, SimPO): pairs of a chosen and a rejected answer, against a frozen reference.

    data.files are rows of {"prompt": …, "chosen": …, "rejected": …}, each a text or messages. dpo.loss may be simpo, which
    needs no reference. Run folder, resume and --processes work as in [bold]train[/bold].
    """,
    "kto": """Preference optimisation (KTO): single answers labelled good or bad, against a frozen reference.

    data.files are rows of {"prompt": …, "completion": …, "label": true or false}, or pairs as for [bold]dpo[/bold].
    Run folder, resume and --processes work as in [bold]train[/bold].
    """,
    "grpo": """Reinforcement learning (GRPO): sample groups of answers, score them with a program, reinforce those above the mean.

    data.files are rows of {"prompt": text or messages, "answer": text}. grpo.reward names a built-in check or your own
    function, rewards.py:score. Run folder, resume and --processes work as in [bold]train[/bold].
    """,
}
EXAMPLES = {"train": "demo"}  # of a command's recipes, where it is not called as the command is


def add_to(app: typer.Typer) -> None:
    for name, about in COMMANDS.items():
        app.command(name, help=about)(training_command(name))


@dataclass(frozen=True)
class TrainingArguments:
    """What was typed after a training command's name."""

    recipe: Path
    settings: list[str]  # section.key=value, each of which changes the recipe
    folder: Path | None
    fresh: bool
    profile: int
    processes: int

    def as_words(self) -> list[str]:
        """The same words again, but for the number of processes."""
        words = [str(self.recipe), *(word for setting in self.settings for word in ("--set", setting))]
        words += ["--folder", str(self.folder)] if self.folder else []
        words += ["--fresh"] if self.fresh else []
        return words + (["--profile", str(self.profile)] if self.profile else [])


def training_command(name: str) -> Callable[..., None]:
    """The function behind a training command; all of them have the same options."""

    def command(
        recipe: Annotated[Path, recipe_argument(EXAMPLES.get(name, name))],
        set_: Set = None,
        folder: Folder = None,
        fresh: Fresh = False,
        profile: Profile = 0,
        processes: Processes = 1,
    ) -> None:
        share_the_cores()
        asked = TrainingArguments(recipe, set_ or [], folder, fresh, profile, processes)
        kind, train = kind_and_trainer(name)
        if processes > 1:
            launch_command(name, kind, asked)
        follow_recipe(kind, train, asked)

    return command


def kind_and_trainer(name: str) -> tuple["type[Recipe]", Callable[..., dict[str, float]]]:
    """The recipes that a training command reads, and the function that trains by one."""
    if name == "train":
        from tilestack.train import Recipe
        from tilestack.train.pretrain import pretrain

        return Recipe, pretrain
    from tilestack.train.align import KINDS, align

    return KINDS[name].recipe, functools.partial(align, name)


def launch_command(name: str, kind: "type[Recipe]", asked: TrainingArguments) -> NoReturn:
    """Run the same command in several processes, and end as they do."""
    from tilestack.parallel.launch import launch
    from tilestack.parallel.mesh import Layout
    from tilestack.train.errors import AFTER_A_LOSS

    if environment.launched():
        raise ValueError(
            f"torchrun has started {environment.world()} processes; leave --processes {asked.processes} out"
        )
    sides = read_recipe(kind, asked).parallel  # once here, for one error instead of many
    grid = dict(tensor=sides.tensor, context=sides.context, pipeline=sides.pipeline, expert=sides.expert)
    Layout.fit(asked.processes, **grid)
    debug = ["--debug"] if "--debug" in sys.argv else []
    raise typer.Exit(launch(asked.processes, [*debug, name, *asked.as_words()], AFTER_A_LOSS))


def read_recipe(kind: "type[Recipe]", asked: TrainingArguments) -> "Recipe":
    """A recipe as the command line changes it; an error says whose it is, if it is another command's."""
    from tilestack.train.settings import RecipeError

    try:
        return kind.load(asked.recipe, asked.settings)
    except RecipeError as problem:
        if environment.rank():  # the first process says it for all
            raise typer.Exit(1) from problem
        raise RecipeError(f"{problem}{whose(asked.recipe, kind)}") from problem


def follow_recipe(kind: "type[Recipe]", train: Callable[..., dict[str, float]], asked: TrainingArguments) -> None:
    """Read a recipe, train as it says, and print the figures; a run that was asked to stop ends with the signal's code."""
    from tilestack.lab import machine
    from tilestack.train.errors import Interrupted

    recipe = read_recipe(kind, asked)
    place = asked.folder or Path("runs") / recipe.run.name
    said = Console(stderr=True)
    stamp = machine.stamp()
    try:
        figures = train(recipe, place, fresh=asked.fresh, profile=asked.profile, provenance=stamp, console=said)
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
    for command, other in recipe_kinds().items():
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
