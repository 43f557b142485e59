"""`tilestack tiles`: a picture of what an operator's kernels read and write."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tilestack.cli.common import (
    JsonFile,
    Load,
    console,
    kernel_device,
    load_files,
    pick_dtypes,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from tilestack.lab.tiles.steps import Recording

FOLDER = Path("runs/tiles")


def add_to(app: typer.Typer) -> None:
    app.command("tiles")(tiles_command)


def tiles_command(
    operator: Annotated[str, typer.Argument(help="The operator, as `tilestack ops` lists it.", show_default=False)],
    backend: Annotated[str | None, typer.Option(help="A backend in Triton; default: that of a --load file, or triton.", show_default=False)] = None,
    case: Annotated[str | None, typer.Option(help="A case by name, 3x33x-1 for one; default: the smallest in which a kernel has several programs.", show_default=False)] = None,
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    dtype: Annotated[str | None, typer.Option(help="float32, float16, bfloat16 or float64; default: the first of them that the backend takes.", show_default=False)] = None,
    layout: Annotated[str, typer.Option(help="How the arguments lie in memory: plain, padded, ragged, strided, transposed or offset.")] = "plain",
    programs: Annotated[int, typer.Option(min=1, help="Programs of each launch to show; all are counted.")] = 256,
    output: Annotated[Path | None, typer.Option(help="The page to write; default: one in runs/tiles.", callback=writable_file, show_default=False)] = None,
    json_: JsonFile = None,
    load: Load = None,
) -> None:  # fmt: skip
    """See what a kernel reads and writes: every load and store of every program, counted, and as a page to step through.

    It runs one call in Triton's interpreter, on any machine, and writes a page: tensors, source, programs, steps.
    The table has the bytes asked for, how often each element is touched, and how many 32-byte sectors warps would ask for.

    [bold]tilestack tiles softmax[/bold] is a first look; [bold]tilestack tiles add --load my_kernels.py[/bold] shows your own.
    """
    kernel_device("cpu")
    from tilestack.lab.tiles.cases import implementation_to_show, record_call
    from tilestack.lab.tiles.page import write_tiles_page
    from tilestack.ops import operator_named

    found = operator_named(operator)
    known = set(found.implementations)
    load_files(load)
    way = implementation_to_show(found, backend, known)
    recording = record_call(way, case, direction, pick_dtypes(dtype), layout, programs)
    page = write_tiles_page(output or FOLDER / page_name(recording), recording)
    show_recording(recording, page, json_)


def page_name(recording: "Recording") -> str:
    claim = recording.claim
    parts = [claim.operator.name, claim.implementation.backend, claim.case.name, claim.direction]
    parts += [claim.variant] * (claim.variant != "plain")
    return "_".join(re.sub(r"[^\w.-]+", "-", part) for part in parts) + ".html"


def show_recording(recording: "Recording", page: Path, json_: Path | None = None) -> None:
    """The counts and where the page is; exit code 1 where the call failed."""
    from tilestack.lab.tiles.counts import as_json, render_counts, total_in_words

    write_json(json_, as_json(recording) | {"page": str(page)})
    if str(json_) != "-":
        console.print(render_counts(recording))
        console.print(total_in_words(recording), highlight=False)
        for number, launch in enumerate(recording.launches, 1):
            if launch.what_is_kept:
                console.print(
                    f"the page shows {launch.what_is_kept} of launch {number}; all are counted", highlight=False
                )
        if recording.error:
            console.print(
                f"[red]the call failed:[/red] {escape(recording.error)}; the page shows what came before",
                soft_wrap=True,
            )
        console.print(f"wrote {escape(str(page))}: open it in a browser", highlight=False, soft_wrap=True)
    if recording.error:
        raise typer.Exit(1)
