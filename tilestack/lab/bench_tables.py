"""Rows of the benchmark as tables in a terminal, losses shown like wins."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tilestack.lab.peers import is_peer
from tilestack.lab.rows import EQUAL, FASTER, SAME_KERNEL, SLOWER, Row

COLOURS = {FASTER: "green", SLOWER: "red", EQUAL: "yellow", SAME_KERNEL: "yellow"}

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
    colour = "dim" if is_peer(row.backend) else COLOURS.get(row.verdict, "default")
    said = f" {row.verdict}" if row.verdict in (EQUAL, SAME_KERNEL) and not is_peer(row.backend) else ""
    return f"[{colour}]{row.ratio_to_best_peer:.2f}{said}[/]"


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
