"""The `tilestack` command. Each command is a thin shell over a function of the layers below.

Bad input ends in one clear line and exit code 1; `tilestack --debug …` shows the traceback. Nothing here imports PyTorch
before a command runs, so that `--help` and a misspelt command answer at once.
"""

import io
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import tilestack
from tilestack.cli import (
    bench,
    chain,
    chat,
    compare,
    demo,
    evaluate,
    export,
    generate,
    lab,
    learn,
    load,
    parallel,
    parity,
    profile,
    quantize,
    recipe_keys,
    serve,
    tiles,
    train,
)
from tilestack.cli.common import in_paragraphs
from tilestack.parallel import environment

app = typer.Typer(
    name="tilestack",
    help=tilestack.__doc__,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS = {
    "Start here": (demo, learn),
    "Kernels: verify, benchmark, inspect": (lab, tiles, bench, profile, compare),
    "Training": (train, recipe_keys, evaluate, parity, chain),
    "Several GPUs": (parallel,),
    "Inference and serving": (generate, chat, serve, load, quantize, export),
}

for panel, parts in PANELS.items():
    known = len(app.registered_commands)
    for part in parts:
        part.add_to(app)
    for command in app.registered_commands[known:]:
        command.rich_help_panel = panel
        command.help = in_paragraphs(command.help or getattr(command.callback, "__doc__", None) or "")


def print_version(wanted: bool) -> None:
    if wanted:
        print(tilestack.__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the process ends with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows a ?, and no result is lost over it
    error = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        sys.exit(app(arguments or ["--help"], standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except Exception as problem:
        if "--debug" in arguments:
            raise
        where = f" on rank {environment.rank()}" if environment.launched() else ""
        error.print(f"[red]error{where}:[/red] {escape(error_in_words(problem))}")
        sys.exit(1)


def error_in_words(problem: Exception) -> str:
    """What went wrong, for a person; errors of the command line itself name their option, those of the system their file."""
    if isinstance(problem, OSError) and problem.strerror:
        names = " and ".join(str(name) for name in (problem.filename, problem.filename2) if name is not None)
        return f"{names}: {problem.strerror.lower()}" if names else problem.strerror.lower()
    named = getattr(problem, "format_message", None)
    return (named() if named else str(problem)).strip() or type(problem).__name__
