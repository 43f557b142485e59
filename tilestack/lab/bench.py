"""The benchmark: every backend of an operator and its peers, over its cases, dtypes and directions, against the roofs.

A row is one candidate on one case. Its `ratio_to_best_peer` is the time of the best peer over its own, so above 1 is a
win; a peer is held against the best of the *other* peers, and has 1.0 when it is alone. What fails becomes a row with a
note instead of figures. Forward runs without gradients; backward is `torch.autograd.grad` on a kept forward, for ours
and the peers alike; `both` is a training step's forward and backward, for operators that do some of one in the other.

Without a GPU the definitions and PyTorch's own functions are timed on the CPU, on the largest case of each operator that
is bearable there; Triton's interpreter is never timed.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from tilestack.contract import Case, Operator, backend
from tilestack.contract.autograd import gradient_of_definition
from tilestack.contract.backends import interpreting
from tilestack.contract.cases import Make
from tilestack.contract.library import memory_of
from tilestack.contract.operator import as_tuple
from tilestack.contract.registry import load_kernels
from tilestack.lab import results
from tilestack.lab.machine import stamp
from tilestack.lab.peers import LIBRARIES, PEERS, Peer, peers_of
from tilestack.lab.roofs import Roofs, measured
from tilestack.lab.timing import Call, Candidate, Timing, in_one_line, measure

DIRECTIONS = ("forward", "backward", "both")
CPU_BYTES = 2**27  # what a case may move, and
CPU_FLOPS = 2e9  # compute, to be bearable on a CPU


@dataclass
class Row:
    op: str
    case: str
    dtype: str
    direction: str
    backend: str
    time_us: float | None = None
    spread: float | None = None
    host_us: float | None = None
    tb_per_s: float | None = None
    tflops: float | None = None
    roof_fraction: float | None = None
    ratio_to_best_peer: float | None = None
    peak_mib: float | None = None
    how: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Row":
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


@dataclass(frozen=True)
class Subject:
    """What one comparison is about: an operator on one case in one dtype."""

    operator: Operator
    case: Case
    dtype: str


def bench(
    operators: Sequence[Operator],
    dtypes: Sequence[str] | None = None,
    directions: Sequence[str] = ("forward", "backward"),
    backends: Sequence[str] | None = None,
    cases: str = "bench",
    device: torch.device | str | None = None,
    save: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Measure operators. `backends` names backends and peers (all that can run when None), `cases` a kind or one case.

    dtypes default to bfloat16 on CUDA and float32 on a CPU. With `save`, rows are merged into that results file as they
    come, so that nothing measured is lost; with a `console`, a progress bar is drawn on it.
    """
    load_kernels()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if unknown := [direction for direction in directions if direction not in DIRECTIONS]:
        raise ValueError(f"no direction is called {', '.join(unknown)}; there are {', '.join(DIRECTIONS)}")
    dtypes = dtypes or (("bfloat16",) if device == "cuda" else ("float32",))
    if unknown := [dtype for dtype in dtypes if not isinstance(getattr(torch, dtype, None), torch.dtype)]:
        raise ValueError(f"no dtype is called {', '.join(unknown)}; write bfloat16, float16 or float32")
    subjects = [
        Subject(described, case, dtype)
        for described in operators
        for dtype in dtypes
        for case in cases_of(described, cases, dtype, device)
    ]
    if not subjects:
        named = ", ".join(described.name for described in operators) or "no operator"
        raise ValueError(f"nothing to measure: {named} has no case {cases!r}; write bench, check or a case's name")
    machine, rows = stamp(device), []
    with progress_bar(console) as progress:
        task = progress.add_task("roofs", total=len(subjects) * len(directions))
        roofs = measured(device)
        for subject in subjects:
            progress.update(task, description=f"{subject.operator.name} {subject.case.name} {subject.dtype}")
            for found in compare(subject, directions_of(subject.operator, directions), backends, device, roofs):
                progress.advance(task)
                rows += found
                if save is not None:
                    results.merge(save, machine, roofs.as_dict(), [row.as_dict() for row in found])
    return rows


def directions_of(described: Operator, wanted: Sequence[str]) -> list[str]:
    """Where gradients are made in the forward, a backward alone says nothing: both are timed together."""
    ahead = any(found.extras and found.extras.overwrites for found in described.implementations.values())
    return list(dict.fromkeys("both" if ahead and direction == "backward" else direction for direction in wanted))


def cases_of(described: Operator, wanted: str, dtype: str, device: str) -> list[Case]:
    """The cases of a kind or name; for the bench on a CPU, the largest case there that does not take minutes."""
    if wanted == "bench" and device == "cpu":
        costs = {}
        for case in described.cases:
            flops, moved = described.cost(described.bind(**case.build(Make(getattr(torch, dtype), "meta"))))
            if flops <= CPU_FLOPS and moved <= CPU_BYTES:
                costs[case] = moved
        return [max(costs, key=costs.__getitem__)] if costs else []
    kinds = [case for case in described.cases if case.kind == wanted]
    return kinds or [case for case in described.cases if case.name == wanted]


def compare(
    subject: Subject, directions: Sequence[str], backends: Sequence[str] | None, device: str, roofs: Roofs
) -> Iterator[list[Row]]:
    """The rows of one subject, direction by direction, so that a peer compiles once for all of them."""
    described = subject.operator
    blank = functools.partial(Row, described.name, subject.case.name, subject.dtype)
    try:
        arguments = described.bind(**subject.case.build(Make(getattr(torch, subject.dtype), device)))
    except Exception as error:
        yield from ([blank(direction, "inputs", note=in_one_line(error))] for direction in directions)
        return
    peers = peers_of(described) if device == "cuda" or backends else {}
    names = backends or [*described.implementations, *peers]
    for direction in directions:
        wanted = differentiable(described, arguments) if direction != "forward" else []
        if direction != "forward" and not wanted:
            yield []
            continue
        refused: dict[str, str] = {}
        candidates: dict[str, Candidate] = {}
        for name in names:
            if reason := refusal(described, name, peers, arguments, direction):
                refused |= {name: reason} if backends else {}
            else:
                peer = peers.get(name) or Peer(described, functools.partial(backend, name))
                candidates[name] = candidate_of(described, peer, arguments, wanted, direction)
        flops, moved = described.cost(arguments, direction)
        timings = measure(candidates, moved, device) | {name: Timing(note=text) for name, text in refused.items()}
        found = [figures(blank(direction, name), timings[name], flops, moved, roofs) for name in timings]
        set_ratios(found)
        yield found
        if device == "cuda":
            torch.cuda.empty_cache()
    if "compile" in names:
        torch.compiler.reset()  # or every case would add to what the compiler keeps


def refusal(described: Operator, name: str, peers: dict[str, Peer], arguments: dict[str, Any], direction: str) -> str:
    """Why a backend or peer cannot be timed on these arguments; empty when it can."""
    device = described.device_of(arguments)
    if name in LIBRARIES and device.type != "cuda":
        return f"{name} needs a GPU"
    if name in peers:
        return ""
    if name not in described.implementations:
        return f"{described.name} has no backend or peer {name} here"
    if name == "triton" and device.type == "cpu" and interpreting():
        return "Triton's interpreter is for proofs; its times mean nothing"
    return described.implementations[name].refuses(arguments, device, direction != "forward")


def differentiable(described: Operator, arguments: dict[str, Any]) -> list[str]:
    """The arguments whose gradients are worth timing: floating-point tensors, less those whose gradient is None.

    None at all where every gradient is a view of one that arrives, as for a transpose: its backward runs nothing.
    """
    floats = {name: isinstance(t := arguments[name], Tensor) and t.is_floating_point() for name in described.tensors}
    if described.gradient is None:
        return [name for name, is_float in floats.items() if is_float]
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    outputs = as_tuple(described.fake(**meta))
    arriving = [torch.empty_like(output) for output in outputs]
    available = meta | dict(zip(described.outputs, outputs, strict=True)) | {"needs": tuple(floats.values())}
    found = gradient_of_definition(described, available | dict(zip(described.grads, arriving, strict=True)))
    gradients = {name: g for name, g in zip(floats, found, strict=True) if floats[name] and g is not None}
    passed_on = all(any(memory_of(gradient) == memory_of(grad) for grad in arriving) for gradient in gradients.values())
    return [] if passed_on else list(gradients)


def candidate_of(
    described: Operator, peer: Peer, arguments: dict[str, Any], wanted: Sequence[str], direction: str
) -> Candidate:
    """A way to run an operator, as something to time in one direction."""
    run = peer.run

    @contextmanager
    def scope() -> Iterator[None]:
        with peer.scope(), torch.set_grad_enabled(direction != "forward"):
            yield

    def copy() -> dict[str, Any]:
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        for name in wanted:
            copied[name].requires_grad_()
        return copied

    def prepare_one() -> Call:
        copied = copy()
        values = tuple(copied.values())
        if direction == "forward":
            return functools.partial(run, *values)
        inputs = [copied[name] for name in wanted]
        outputs = differentiable_outputs(run(*values))
        # At a loss a one arrives, as `loss.backward()` sends it.
        arriving = [torch.randn_like(output) if output.ndim else torch.ones_like(output) for output in outputs]
        if direction == "backward":
            return functools.partial(
                torch.autograd.grad, outputs, inputs, arriving, retain_graph=True, allow_unused=True
            )
        return lambda: torch.autograd.grad(differentiable_outputs(run(*values)), inputs, arriving, allow_unused=True)

    return Candidate(lambda copies: [prepare_one() for _ in range(copies)], scope)


def differentiable_outputs(out: Any) -> list[Tensor]:
    return [output for output in as_tuple(out) if isinstance(output, Tensor) and output.requires_grad]


def figures(row: Row, timing: Timing, flops: float, moved: float, roofs: Roofs) -> Row:
    """A row with what was measured and what follows from it, but for the ratio."""
    for name, value in vars(timing).items():
        setattr(row, name, value)
    if timing.time_us:
        row.tb_per_s = moved / timing.time_us * 1e-6
        row.tflops = flops / timing.time_us * 1e-6
        row.roof_fraction = roofs.floor_us(flops, moved, row.dtype) / timing.time_us
    return row


def set_ratios(rows: Sequence[Row]) -> None:
    """Fill in each row's ratio to the best peer among the rows of one comparison."""
    for row in rows:
        others = [
            peer.time_us
            for peer in rows
            if peer.backend in PEERS and peer.backend != row.backend and peer.time_us is not None
        ]
        if row.time_us is None:
            continue
        if not others:
            row.ratio_to_best_peer = 1.0 if row.backend in PEERS else None
        elif row.time_us > 0:
            row.ratio_to_best_peer = min(others) / row.time_us
        elif min(others) == 0:
            row.ratio_to_best_peer = 1.0  # neither runs anything


def progress_bar(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console or Console(quiet=True), transient=True, disable=console is None)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "time µs": lambda row: number(row.time_us, ".1f"),
    "±": lambda row: number(row.spread, ".0%"),
    "host µs": lambda row: number(row.host_us, ".1f"),
    "TB/s": lambda row: number(row.tb_per_s, ".2f"),
    "TFLOP/s": lambda row: number(row.tflops, ".0f"),
    "of roof": lambda row: number(row.roof_fraction, ".0%"),
    "× best peer": lambda row: ratio(row),
    "peak MiB": lambda row: number(row.peak_mib, ".0f"),
}


EMPTY = ("–", "0", "0.00")


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def ratio(row: Row) -> str:
    if row.ratio_to_best_peer is None:
        return "–"
    colour = "dim" if row.backend in PEERS else "green" if row.ratio_to_best_peer >= 1 else "red"
    return f"[{colour}]{row.ratio_to_best_peer:.2f}[/]"


def tables(rows: Sequence[Row], machine: dict[str, Any]) -> list[Table]:
    """A table per operator, losses shown like wins; on a CPU the title says that these are no kernel figures."""
    where = machine["gpu"] or f"CPU only ({machine['cpu']}): definitions, not kernels"
    found = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in mine))
        table = Table(title=f"{op} in {dtypes} on {where}", title_justify="left")
        # What is the same or nothing in every row says nothing, and a terminal is narrow.
        several, noted = "," in dtypes, any(row.note for row in mine)
        columns = [heading for heading, cell in COLUMNS.items() if any(cell(row) not in EMPTY for row in mine)]
        for heading in ("case", "direction", "backend"):
            table.add_column(heading, overflow="fold")
        for heading in columns:
            table.add_column(heading, justify="right")
        if noted:
            table.add_column("note")
        last = None
        for row in mine:
            about = f"{row.case} {row.dtype}" if several else row.case, row.direction
            if last is not None and about != last:
                table.add_section()
            cells = [COLUMNS[heading](row) for heading in columns]
            table.add_row(
                *(about if about != last else ("", "")), row.backend, *cells, *([escape(row.note)] if noted else [])
            )
            last = about
        found.append(table)
    return found
