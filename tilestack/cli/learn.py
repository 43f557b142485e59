"""`tilestack learn`: exercises in GPU programming, whose solutions are backends that `tilestack verify` could prove."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from tilestack.cli.common import (
    Device,
    JsonFile,
    console,
    has_nvidia_driver,
    in_home,
    in_paragraphs,
    kernel_device,
    progress_bar,
    writable_folder,
)
from tilestack.learn.exercise import BACKEND, EXERCISES, Exercise, find_exercise
from tilestack.learn.folder import DEFAULT, Folder, State

if TYPE_CHECKING:
    from tilestack.contract.implementation import Implementation
    from tilestack.learn.check import Checked
    from tilestack.learn.finding import Finding

learn = typer.Typer(rich_markup_mode="rich")
STYLES = {State.NOT_BEGUN: "dim", State.BEGUN: "yellow", State.PASSES: "green", State.EVERYTHING: "bold green"}
aside = Console(stderr=True, highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="The exercise, as `tilestack learn` lists it.", show_default=False)]
FolderOption = Annotated[Path, typer.Option("--folder", help="Your folder of exercises.", callback=in_home)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def add_to(app: typer.Typer) -> None:
    help_text = in_paragraphs(list_command.__doc__ or "")
    app.add_typer(learn, name="learn", help=help_text, rich_help_panel="Start here")
    for command in learn.registered_commands:
        command.help = in_paragraphs(getattr(command.callback, "__doc__", None) or "")


@learn.callback(invoke_without_command=True)
def list_command(context: typer.Context, folder: FolderOption = DEFAULT.path, json_: Json = False) -> None:
    """Learn to write GPU kernels: exercises from vector addition to flash attention, proved right as you go.

    You know PyTorch; neither CUDA nor a GPU is needed. [bold]tilestack learn start add[/bold] writes a file that states a
    problem and holds a kernel with a hole in it. You fill the hole, and [bold]tilestack learn check add[/bold] says
    whether it is right, or shows the first wrong numbers and what may explain them.

    Without a command it lists the exercises, how far you are, and what to do next.
    """
    if context.invoked_subcommand is not None:
        if folder != DEFAULT.path or json_:
            raise ValueError(f"write options behind the command: tilestack learn {context.invoked_subcommand} …")
        return
    mine = Folder(folder)
    states = {exercise: mine.state(exercise) for exercise in EXERCISES.values()}
    if json_:
        print(json.dumps([as_row(mine, exercise, state) for exercise, state in states.items()], indent=1))
        return
    name = Column("exercise", no_wrap=True)  # which is to be typed
    table = Table("", name, "what is new in it", "state", box=None, pad_edge=False)
    for number, (exercise, state) in enumerate(states.items(), 1):
        table.add_row(
            str(number), f"[bold]{exercise.name}[/bold]", escape(exercise.teaches), Text(state, STYLES[state])
        )
    console.print(table)
    console.print("\n" + escape(what_next(mine, states)), highlight=False, soft_wrap=True)


def as_row(mine: Folder, exercise: Exercise, state: State) -> dict[str, str | int | None]:
    file = None if state is State.NOT_BEGUN else str(mine.attempt(exercise))
    return dict(
        name=exercise.name,
        operator=exercise.operator,
        teaches=exercise.teaches,
        state=state,
        file=file,
        hints=len(exercise.hints),
        hints_shown=mine.hints_shown(exercise),
    )


def what_next(mine: Folder, states: dict[Exercise, State]) -> str:
    """What to do, in a line: the first exercise that does not pass, or the first that does not pass everything."""
    for exercise, state in states.items():
        if state is State.NOT_BEGUN:
            return f"next: {mine.command('start', exercise)}"
        if state is State.BEGUN:
            return f"next: edit {mine.attempt(exercise)}, then {mine.command('check', exercise)}"
    for exercise, state in states.items():
        if state is State.PASSES:
            return f"All pass. next: {mine.command('check', exercise)} --all"
    return "All pass everything. On a GPU, `tilestack learn compare NAME` shows what there is left to gain."


@learn.command("start")
def start_command(
    name: Name,
    folder: FolderOption = DEFAULT.path,
    again: Annotated[bool, typer.Option("--again", help="Begin anew in another file, NAME_2.py and so on.")] = False,
) -> None:
    """Write the file of an exercise: the problem, a picture, and the kernel to fill in. Overwrites nothing."""
    exercise, mine = find_exercise(name), Folder(folder)
    path = mine.start(exercise, again)
    do = "find the bug in it and mend it" if exercise.is_repair else "fill in what is marked `Yours:`"
    console.print(
        escape(f"wrote {path}: read it, {do}, then\n{mine.command('check', exercise)}"), highlight=False, soft_wrap=True
    )


@learn.command("check")
def check_command(
    name: Name,
    folder: FolderOption = DEFAULT.path,
    everything: Annotated[
        bool, typer.Option("--all", help="Every memory layout, value, dtype and gradient, as `tilestack verify` does.")
    ] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one case may take.")] = 60,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Prove your kernel, the smallest cases first; stop at the first wrong result and explain it. Exit code 1 if wrong.

    Your file is run as the backend [bold]mine[/bold], in a process of its own: where there is no GPU, in Triton's
    interpreter. What has passed is kept in progress.json in your folder, until you edit the file.
    """
    exercise, mine = find_exercise(name), Folder(folder)
    path = mine.attempt(exercise)
    writable_folder(folder)  # before the work is done that is recorded there
    place = device_of_child(device)
    from tilestack.learn.check import check

    with progress_bar() as progress:
        bar = progress.add_task(f"checking {exercise.name}", total=None)
        tell = lambda number, count: progress.update(bar, completed=max(number - 1, 0), total=count or None)
        checked = check(exercise, mine, place, everything, limit, tell)
    if json_:
        print(
            json.dumps(
                dict(exercise=exercise.name, file=str(path), passed=checked.wrong is None, **asdict(checked)), indent=1
            )
        )
    else:
        console.print(render_attempt(exercise, mine, checked), soft_wrap=True)
    if checked.wrong is not None:
        raise typer.Exit(1)


def device_of_child(name: str | None) -> str:
    """The device to check on; without NVIDIA's driver, PyTorch need not be imported here to know."""
    if name == "cpu" or (name is None and not has_nvidia_driver()):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # the process that checks inherits it
        return "cpu"
    return kernel_device(name).type


def render_attempt(exercise: Exercise, mine: Folder, checked: "Checked") -> Group:
    """What became of an attempt, and what to do next."""
    if checked.wrong is not None:
        held = f", after {checked.proved} of {checked.claims} claims that hold" if checked.proved else ""
        first = Text.assemble(("✗ ", "red"), (f"{exercise.name} is not right yet", "bold"), held)
        stuck = (
            f"A hint: {mine.command('hint', exercise)}\nSee what it reads and writes: {mine.command('show', exercise)}"
        )
        return Group(first, *render_finding(checked.wrong, mine.attempt(exercise)), Text(stuck, "dim"))
    line = Text.assemble(
        ("✓ ", "green"), (f"{exercise.name} {checked.state}", "bold"), f": {checked.claims} claims hold"
    )
    states = {each: mine.state(each) for each in EXERCISES.values()}
    more = f"Every layout, value and dtype: {mine.command('check', exercise)} --all"
    see = Text(f"See it: {mine.command('show', exercise)}")
    return Group(line, *([Text(more)] if checked.state is State.PASSES else []), see, Text(what_next(mine, states)))


def render_finding(wrong: "Finding", path: Path) -> Iterator[Text | Table]:
    """Lines of their own length, so that a path is never broken and a terminal can open it."""
    if wrong.call:
        yield Text.assemble("  ", (wrong.call, "bold"), f"    {wrong.claim}")
    yield Text(f"  {wrong.what}")
    if wrong.elements:
        table = Table("place", "yours", "right", box=None, padding=(0, 2))
        for element in wrong.elements:
            table.add_row(Text(element.place), Text(element.yours, "red"), Text(element.right, "green"))
        yield table
    if wrong.line:
        yield Text.assemble(f"  {path}:{wrong.line}    ", (wrong.code, "bold"))
    for advice in wrong.advice:
        yield Text(f"  {advice}", "cyan")


@learn.command("show")
def show_command(
    name: Name,
    folder: FolderOption = DEFAULT.path,
    case: Annotated[
        str | None,
        typer.Option(help="A case by name; default: the smallest in which a kernel has several programs.", show_default=False),
    ] = None,
    direction: Annotated[
        str | None, typer.Option(help="forward or backward; default: what the exercise is about.", show_default=False)
    ] = None,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """See what your kernel reads and writes, right or wrong: a table, and a page to step through.

    Your file is run in Triton's interpreter, and the page is written beside it. Where your kernel crashes, the page shows
    what it did until then. Ctrl-C ends one that never does, and shows what it did.
    """
    exercise, mine = find_exercise(name), Folder(folder)
    path = mine.attempt(exercise)
    writable_folder(folder)
    kernel_device("cpu")
    from tilestack.cli.tiles import show_recording
    from tilestack.lab.tiles.cases import record_call
    from tilestack.lab.tiles.page import write_tiles_page

    recording = record_call(load_attempt(exercise, path), case, direction or exercise.direction)
    show_recording(recording, write_tiles_page(path.with_suffix(".html"), recording), json_)


def load_attempt(exercise: Exercise, path: Path) -> "Implementation":
    """What a file registers as the backend `mine`."""
    from tilestack.lab.proof.workers import load_file
    from tilestack.ops import operator_named

    load_file(path)
    operator = operator_named(exercise.operator)
    if BACKEND not in operator.implementations:
        raise ValueError(f"{path} registers no backend {BACKEND!r} for {operator.name}; check says more")
    return operator.implementations[BACKEND]


@learn.command("hint")
def hint_command(name: Name, folder: FolderOption = DEFAULT.path) -> None:
    """Show one more hint, from a nudge to nearly the answer; after the last, all of them again."""
    exercise, mine = find_exercise(name), Folder(folder)
    mine.attempt(exercise)
    shown, count = mine.hints_shown(exercise), len(exercise.hints)
    for number in range(1, count + 1) if shown >= count else [shown + 1]:
        console.print(Text.assemble((f"hint {number} of {count}: ", "bold"), exercise.hints[number - 1]))
    if shown >= count - 1:
        console.print(Text(f"There are no more; one solution: {mine.command('solution', exercise)}", "dim"))
    mine.record(exercise, hints=min(shown + 1, count))


@learn.command("solution")
def solution_command(
    name: Name,
    folder: FolderOption = DEFAULT.path,
    write: Annotated[
        bool, typer.Option("--write", help="Write it to NAME_solution.py in your folder instead.")
    ] = False,
) -> None:
    """Print a solution, which is as short as it can be and not fast. What is lost: finding it yourself."""
    exercise, mine = find_exercise(name), Folder(folder)
    if not mine.state(exercise).is_done:
        left = max(len(exercise.hints) - mine.hints_shown(exercise), 0)
        hints = "1 hint is" if left == 1 else f"{left} hints are"
        aside.print(f"Finding it yourself is where the learning is; {hints} left.")
    if not write:
        print(exercise.solution())
        return
    target = mine.path / f"{exercise.name}_solution.py"
    mine.write_new(target, exercise.solution())
    console.print(escape(f"wrote {target}"), highlight=False)


@learn.command("compare")
def compare_attempt_command(name: Name, folder: FolderOption = DEFAULT.path) -> None:
    """Time your kernel beside ours and PyTorch's own, on a GPU."""
    exercise, mine = find_exercise(name), Folder(folder)
    path = mine.attempt(exercise)
    if not has_nvidia_driver() or kernel_device(None).type != "cuda":
        raise ValueError("compare times kernels and needs a GPU, which is not here; check needs none")
    from tilestack.lab import machine
    from tilestack.lab.bench import terminal_tables
    from tilestack.lab.bench.operators import bench_operators

    if not mine.state(exercise).is_done:
        aside.print(f"{path} does not pass yet, so these may be times of something else")
    implementation = load_attempt(exercise, path)
    operator = implementation.operator
    backends = [backend for backend in (BACKEND, "triton", "aten") if backend in operator.implementations]
    directions = ["forward", "backward"] if implementation.backward else ["forward"]
    rows = bench_operators([operator], directions=directions, backends=backends, console=Console(stderr=True))
    for table in terminal_tables.render_rows(rows, machine.stamp("cuda")):
        console.print(table)
