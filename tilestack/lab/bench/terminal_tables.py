"""Rows of the benchmark as tables in a terminal, losses shown like wins."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tilestack.lab.bench.peers import is_peer
from tilestack.lab.contests import Result, contests, means
from tilestack.lab.labels import case_label
from tilestack.lab.rows import EQUAL, FASTER, SAME_KERNEL, SLOWER, Row
from tilestack.lab.units import microseconds, times

COLOURS = {FASTER: "green", SLOWER: "red", EQUAL: "yellow", SAME_KERNEL: "yellow"}

COLUMNS: dict[str, Callable[[Row], str]] = {
    "time": lambda row: microseconds(row.time_us),
    "±": lambda row: number(row.spread, ".0%"),
    "host": lambda row: "–" if row.how == "cpu" else microseconds(row.host_us),  # on a CPU it is the time itself
    "TB/s": lambda row: "–" if row.how == "cpu" else number(row.tb_per_s, ".2f"),
    "TFLOP/s": lambda row: "–" if row.how == "cpu" else number(row.tflops, ".0f"),
    "GB/s": lambda row: thousands(row.tb_per_s) if row.how == "cpu" and not is_arithmetic(row) else "–",
    "GFLOP/s": lambda row: thousands(row.tflops) if row.how == "cpu" and is_arithmetic(row) else "–",
    "of roof": lambda row: number(row.roof_fraction, ".0%"),
    "× best peer": lambda row: ratio(row),
    "peak MiB": lambda row: number(row.peak_mib, ".0f"),
    "cosine": lambda row: number(row.cosine, ".5f"),
    "relative error": lambda row: number(row.relative_error, ".2%"),
}


MUCH = 10  # operations a byte, about where a CPU has more to compute than to read
EMPTY = ("–", "0", "0.00", "0.0 µs")


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def thousands(value: float | None) -> str:
    """Of a unit a thousand times smaller, which a CPU's rates are counted in."""
    return "–" if value is None else f"{1e3 * value:.3g}"


def is_arithmetic(row: Row) -> bool:
    """Whether a row has so much to compute for each byte that its rate is one of arithmetic."""
    return (row.tflops or 0) > MUCH * (row.tb_per_s or 0)


def ratio(row: Row) -> str:
    if row.ratio_to_best_peer is None:
        return "–"
    colour = "dim" if is_peer(row.backend) else COLOURS.get(row.verdict, "default")
    said = (
        "\n" + row.verdict.replace(" ", "\n")
        if row.verdict in (EQUAL, SAME_KERNEL) and not is_peer(row.backend)
        else ""
    )
    return f"[{colour}]{row.ratio_to_best_peer:.2f}{said}[/]"


def render_rows(rows: Sequence[Row], machine: dict[str, Any]) -> list[Table]:
    """A table per operator, losses shown like wins, and one of its means; on a CPU the title says that these are no kernel
    figures."""
    where = machine["gpu"] or f"CPU only ({machine['cpu']}): definitions, not kernels"
    found = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in mine))
        timed = None if machine["gpu"] else "processor time of one thread"
        table = Table(title=f"{op} in {dtypes} on {where}", title_justify="left", caption=timed, caption_justify="left")
        # What is the same or nothing in every row says nothing, and a terminal is narrow.
        several, noted = "," in dtypes, any(row.note for row in mine)
        columns = [heading for heading, cell in COLUMNS.items() if any(cell(row) not in EMPTY for row in mine)]
        table.add_column("case", overflow="fold")  # what gives way where a terminal is narrow
        for heading in ("direction", "backend"):
            table.add_column(heading, no_wrap=True)
        for heading in columns:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        if noted:
            table.add_column("note")
        last = None
        for row in mine:
            label = case_label(row.op, row.case)
            about = f"{label}, {row.dtype}" if several else label, row.direction
            if last is not None and about != last:
                table.add_section()
            cells = [COLUMNS[heading](row) for heading in columns]
            table.add_row(
                *(about if about != last else ("", "")), row.backend, *cells, *([escape(row.note)] if noted else [])
            )
            last = about
        found.append(table)
        found += table_of_means(op, mine, machine)
    return found


def table_of_means(op: str, rows: Sequence[Row], machine: dict[str, Any]) -> list[Table]:
    """What the cases of an operator come to against the fastest peer of each, where there are several."""
    made = means(contests([Result(machine, {}, [row.as_dict() for row in rows])]))
    if not made:
        return []
    table = Table(title=f"{op} against the fastest peer, over its cases", title_justify="left")
    for heading in ("dtype", "direction", "backend"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "geometric\nmean", "least"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("on", overflow="fold")
    for mean in made:
        least = times(mean.worst.ratio)
        table.add_row(mean.dtype, mean.direction, mean.backend, mean.cases, times(mean.mean), least, mean.worst.label)
    return [table]
