"""The `tilestack` command. Each command is a thin shell over a function of the layers below.

Bad input ends in one clear line and exit code 1; `tilestack --debug …` shows the traceback.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import tilestack
from tilestack.cli import align, bench, demo, evaluate, generate, lab, train

app = typer.Typer(
    name="tilestack",
    help=tilestack.__doc__,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for part in (lab, bench, train, align, evaluate, generate, demo):
    part.add_to(app)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version."""
    print(tilestack.__version__)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the process ends with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    error = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        sys.exit(app(arguments or ["--help"], standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except Exception as problem:
        if "--debug" in arguments:
            raise
        error.print(f"[red]error:[/red] {escape(str(problem).strip() or type(problem).__name__)}")
        sys.exit(1)
