"""What there is: every operator with its signature, its backends and the one `auto` takes on a device."""

import inspect
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from tilestack import ops
from tilestack.contract.backends import usable
from tilestack.contract.cases import Make
from tilestack.contract.operator import Operator
from tilestack.contract.registry import candidates
from tilestack.lab.labels import labels_of


def catalogue(device: torch.device, chosen: Sequence[Operator]) -> list[dict[str, Any]]:
    return [
        dict(
            name=operator.name,
            family=operator.family,
            signature=str(operator.signature).replace("torch.", ""),
            summary=next(iter((operator.__doc__ or "").strip().splitlines()), ""),
            backends=list(operator.implementations),
            usable=[name for name in operator.implementations if usable(name, device) is True],
            auto=automatic(operator, device),
        )
        for operator in chosen
    ]


def automatic(operator: Operator, device: torch.device) -> str:
    """What `auto` would take for the operator's largest case in bfloat16."""
    arguments = operator.bind(**operator.cases[-1].build(Make(torch.bfloat16, "meta")))
    fitting = (
        c for c in candidates(operator, arguments, device, with_gradient=False) if not c.refuses(arguments, device)
    )
    return next(fitting, operator.implementations["torch"]).backend


def render_operators(rows: list[dict[str, Any]]) -> Table:
    name = Column("operator", no_wrap=True)  # which is to be typed
    table = Table(name, "what it is", "backends", "auto here", title="Operators")
    for row in rows:
        backends = ", ".join(name if name in row["usable"] else f"[dim]{name}[/dim]" for name in row["backends"])
        table.add_row(f"[bold]{row['name']}[/bold]", escape(row["summary"]), backends, row["auto"])
    table.caption = "dim backends cannot run on this device"
    return table


def render_operator(operator: Operator, device: torch.device) -> Group:
    """One operator in full: what it computes, where it is defined, and each backend with where it is and why not here."""
    table = Table("backend", "here", Column("defined in", overflow="fold"))
    for name, implementation in operator.implementations.items():
        here = usable(name, device)
        table.add_row(name, "yes" if here is True else escape(str(here)), implementation.forward.__module__)
    cases = Table("measured on", Column("--case", overflow="fold"))
    for case in operator.cases:
        if case.kind == "bench":
            cases.add_row(labels_of(operator.name)[case.name], case.name)
    signature = str(operator.signature).replace("torch.", "")
    return Group(
        Text.assemble((operator.name, "bold"), signature),
        Text(unwrapped(operator.__doc__ or ""), style="dim"),
        f"defined in {operator.definition.__module__}; auto takes {automatic(operator, device)} here",
        table,
        *([cases] if cases.row_count else []),
        f"prove it: tilestack verify {operator.name}    measure it: tilestack bench {operator.name}",
    )


def unwrapped(docstring: str) -> str:
    """A docstring whose paragraphs are a line each, so that a terminal breaks them at its own width."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    is_drawn = lambda text: any(line.startswith(" ") for line in text.splitlines())  # as a formula is
    return "\n\n".join(text if is_drawn(text) else " ".join(text.splitlines()) for text in paragraphs)


STUB = Path(ops.__file__).with_suffix(".pyi")


def stub() -> str:
    """What `tilestack.ops` holds, for people and type checkers: the package itself finds its operators when imported."""
    defined = sorted((op.__module__, op.name) for op in ops.operators() if op.__module__.startswith("tilestack.ops."))
    lines = [
        f"from {module} import {', '.join(f'{name} as {name}' for _, name in found)}"
        for module, found in groupby(defined, key=lambda pair: pair[0])
    ]
    return "\n".join(
        [
            "# Written by `make docs`: every operator by the family that defines it.",
            "from tilestack.contract.registry import operator_named as operator_named, operators as operators",
            *lines,
            "",
        ]
    )


def update_stub() -> list[Path]:
    """Write the stub where it has changed; answers what was written."""
    if STUB.read_text() == stub():
        return []
    STUB.write_text(stub())
    return [STUB]
