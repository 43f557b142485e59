"""What there is: every operator with its signature, its backends and the one `auto` takes on a device."""

from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from tilestack import ops
from tilestack.ops.backends import usable
from tilestack.ops.cases import Make
from tilestack.ops.contract import Operator
from tilestack.ops.registry import candidates


def catalogue(device: torch.device) -> list[dict[str, Any]]:
    return [
        dict(
            name=described.name,
            family=described.family,
            signature=str(described.signature).replace("torch.", ""),
            summary=(described.__doc__ or "").strip().splitlines()[0],
            backends=list(described.implementations),
            usable=[name for name in described.implementations if usable(name, device) is True],
            auto=automatic(described, device),
        )
        for described in ops.operators()
    ]


def automatic(described: Operator, device: torch.device) -> str:
    """What `auto` would take for the operator's largest case in bfloat16."""
    arguments = described.bind(**described.cases[-1].build(Make(torch.bfloat16, "meta")))
    fitting = (c for c in candidates(described, arguments, device) if not c.refuses(arguments, device))
    return next(fitting, described.implementations["torch"]).backend


def render(rows: list[dict[str, Any]]) -> Table:
    table = Table("operator", "what it is", "backends", "auto here", title="Operators")
    for row in rows:
        backends = ", ".join(name if name in row["usable"] else f"[dim]{name}[/dim]" for name in row["backends"])
        table.add_row(f"[bold]{row['name']}[/bold]", escape(row["summary"]), backends, row["auto"])
    table.caption = "dim backends cannot run on this device"
    return table
