"""The laboratory's commands: what is here, is it right, is it fast."""

import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    import torch

    from tilestack.lab.verify import Proof
    from tilestack.ops.contract import Operator

console = Console()

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
    for command in (operators_, verify_):
        app.command(command.__name__.rstrip("_") if command is not operators_ else "ops")(command)


def pick_device(name: str | None) -> "torch.device":
    """The device to work on; without a GPU, set up Triton's interpreter before anything imports Triton."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, not {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU is visible here; use --device cpu")
    if name == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
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
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def operators_(
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


def verify_(
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
    from tilestack.lab import verify

    place = pick_device(device)
    load_files(load)
    chosen = pick_operators(operators)
    backends = verify.chosen_backends(chosen, place, backend)
    kinds = ("check", "bench") if large else ("check",)
    claims = list(
        verify.claims(chosen, place, backends=backends, dtypes=pick_dtypes(dtype), kinds=kinds, every_variant=not quick)
    )
    proofs: list[Proof] = []
    with progress_bar() as progress:
        for claim in progress.track(claims, description="verifying"):
            proofs.append(verify.prove(claim))
    write_json(json_, [asdict(proof) for proof in proofs])
    if str(json_) != "-":
        console.print(verify.render(proofs, place))
    if any(proof.ok is False for proof in proofs):
        raise typer.Exit(1)
