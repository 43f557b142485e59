"""What the commands share: options, the choice of device, operators and dtypes, and where results are written."""

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilestack.files import expand_home, naming

if TYPE_CHECKING:
    import torch

    from tilestack.contract.operator import Operator
    from tilestack.lab.proof.claims import Proof
    from tilestack.lab.proof.workers import Task

console = Console()
SAVE_EVERY = 5.0  # seconds, of proofs
BRIEFLY = "1000"  # turns of the loop in which a thread of OpenMP waits, some microseconds


Place = TypeVar("Place", Path, Path | None)


def writable_file(path: Place) -> Place:
    """A file to write. Refuse one that cannot be written before the work is done that should go into it."""
    if path is None:
        return path
    refuse_output(path)
    path = expand_home(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    refuse_unwritable(path, name=path)
    return path


def file_or_output(path: Path | None) -> Path | None:
    """The same of a file for which - stands for standard output."""
    return path if str(path) == "-" else writable_file(path)


def report_page(path: Path) -> Path:
    """The same of a page of results, which replaces no other file."""
    if (page := writable_file(path)).is_file():
        from tilestack.lab.report.page import refuse_other_file

        refuse_other_file(page)
    return page


def refuse_output(path: Path) -> None:
    if str(path) == "-":
        raise ValueError("- is standard output, which only --json writes to; name a file")


def refuse_unwritable(path: Path, name: Path) -> None:
    """Refuse what cannot be written, which the error calls by a name."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if there.is_file() and there != path.absolute():
        raise ValueError(f"cannot write {name}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ValueError(f"cannot write {name}: no permission to write {there}")


def writable_folder(path: Place) -> Place:
    """A folder to write. Refuse one in which no file can be written, likewise."""
    if path is not None:
        refuse_output(path)
        refuse_unwritable(expand_home(path) / "file", name=path)
    return in_home(path)


def in_home(path: Place) -> Place:
    """A path, also where the shell left its ~ alone, as it does after --folder=; it would be a folder of that name."""
    return path if path is None else expand_home(path)


Operators = Annotated[list[str] | None, typer.Argument(help="Operators by name; default: all.", show_default=False)]
Device = Annotated[
    str | None,
    typer.Option(
        help="cuda or cpu; default: the GPU if there is one. On cpu, Triton kernels run in its interpreter.",
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
    typer.Option(
        "--json",
        help="Also write the rows to this file; - for standard output.",
        callback=file_or_output,
        show_default=False,
    ),
]
Load = Annotated[
    list[Path] | None,
    typer.Option(help="A Python file to run first, such as one that registers your own backend.", show_default=False),
]


def in_paragraphs(help_text: str) -> str:
    """A docstring whose paragraphs are a line each, so that they wrap where the reader's terminal ends and not ours."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in help_text.split("\n\n"))


def given_text(argument: str) -> str:
    """What was given on the command line, or with - on standard input."""
    if argument == "-":
        if sys.stdin is None:
            raise ValueError("- reads standard input, and there is none")
        return sys.stdin.read().removesuffix("\n")  # which echo and editors put behind a text, and no model expects
    return os.fsencode(argument).decode(errors="replace")  # bytes that are no text come as half characters


def kernel_device(name: str | None) -> "torch.device":
    """The device to run kernels on; on a CPU, Triton interprets them.

    Triton must know that it interprets when it is imported, which PyTorch does. Where PyTorch is needed to find out that
    there is no GPU, the command starts over, having said so.
    """
    if "torch" not in sys.modules and (name == "cpu" or (name is None and not has_nvidia_driver())):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from tilestack.contract.backends import interpreting
    from tilestack.device import pick_device

    picked = pick_device(name)
    if picked.type == "cpu" and not interpreting():
        command = [sys.executable, "-m", "tilestack", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    return picked


def share_the_cores() -> None:
    """Let PyTorch's threads wait for each other only briefly before they sleep, for a command that trains; to be called before
    PyTorch is imported, when OpenMP reads it.

    Otherwise they stay awake for milliseconds after each operator. A small model has thousands of short operators a second,
    and where another program wants the same cores, threads that wait keep out those they wait for: a training step then
    takes many times as long. Where they sleep at once, waking them takes as long as many operators do. What is computed is
    the same. Who has chosen a policy keeps it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = BRIEFLY


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is on this machine; without it there is no GPU to ask PyTorch for."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return sys.platform != "linux"  # elsewhere it has other names
    return True


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


def refuse_ignored_options(context: typer.Context, what: str, read: Sequence[str]) -> None:
    """Refuse an option that was given and would not be read: whoever gave it would believe the figures to be of it."""
    options = [param.name or "" for param in context.command.params if param.param_type_name == "option"]
    given = [name.strip("_") for name in options if is_given(context, name)]
    if ignored := sorted(set(given) - {*read}):
        written = lambda names: ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"{what} does not read {written(ignored)}; it reads {written(read)}")


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def load_files(paths: Iterable[Path] | None) -> None:
    from tilestack.lab.proof import workers

    workers.load_files(paths)


def write_json(target: Path | None, rows: Any) -> None:
    if target is None:
        return
    text = json.dumps(rows, indent=1)
    if str(target) == "-":
        print(text)
    else:
        write_text(target, text + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text(text)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def prove_all(
    tasks: Sequence["Task"],
    jobs: int = 1,
    files: Sequence[Path] = (),
    save: Callable[[list["Proof"]], None] | None = None,
    budget: float = math.inf,
) -> list["Proof"]:
    """The proofs of all tasks that began within some seconds, in their order; they are saved as they come."""
    from tilestack.lab.proof.workers import prove_tasks

    done: dict[Task, list[Proof]] = {}
    unsaved: list[Proof] = []
    wrong, saved_at = 0, time.monotonic()
    with progress_bar() as progress:
        bar = progress.add_task("verifying", total=len(tasks))
        try:
            for task, proofs in prove_tasks(tasks, jobs, files, budget):
                done[task] = proofs
                unsaved += proofs
                wrong += sum(proof.ok is False for proof in proofs)
                what = f"verified {task.operator}" + (f", {wrong} wrong" if wrong else "")
                progress.update(bar, advance=1, description=what)
                if save and time.monotonic() - saved_at > SAVE_EVERY:
                    save(unsaved)
                    unsaved, saved_at = [], time.monotonic()
        finally:
            if save and unsaved:
                save(unsaved)
        if left := len(tasks) - len(done):
            progress.console.print(f"{left} of {len(tasks)} were not begun within {budget:g} seconds")
    return [proof for task in tasks for proof in done.get(task, ())]
