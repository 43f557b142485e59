"""Tables of what engines do: `tilestack bench serve` and `tilestack bench http`."""

from pathlib import Path
from typing import Any

from tilestack.lab.results import machine_name, path_of, read_json
from tilestack.lab.stale import is_current
from tilestack.lab.tables.markdown import OLD, markdown, not_measured, older_rows
from tilestack.lab.units import percent, times

# Of workloads, in the order in which docs/serving.md explains them.
WORKLOAD_KINDS = ("throughput", "batch", "first token", "prefix", "long", "copying")


def serving(folder: Path, slug: str) -> str:
    """Engines on the same workloads: a line per workload and way of ours, beside each other engine."""
    path = path_of(slug, "serve", folder)
    if not path.exists():
        return not_measured("tilestack bench serve --save", machine=slug)
    rows = read_json(path)["rows"]
    others = list(dict.fromkeys(row["backend"] for row in rows if not is_ours(row)))
    dagger = lambda row: "" if is_current(row) else f" {OLD}"
    lines = []
    for row in sorted(filter(is_ours, rows), key=lambda row: place_of(row["case"])):
        peers = {other["backend"]: other for other in on_the_same_work(rows, row)}
        line = [row["case"], row["backend"] + dagger(row), f"**{figure(row)}** {row['unit']}", percent(row["roof"])]
        for name in others:
            peer = peers.get(name)
            line.append(figure(peer) + dagger(peer) if peer else "–")
            line.append(times(times_as_fast(row, peer)) if peer else "–")
        lines.append(line)
    header = ["workload", "engine", "result", "of memory bandwidth", *(word for name in others for word in (name, f"against {name}"))]  # fmt: skip
    when = dict.fromkeys(f"{with_version(row)} {row['date'][:16].replace('T', ' ')}" for row in rows)
    machine = read_json(path)["machine"]
    stamp = f"_Measured on {machine_name(machine)}, in UTC: {', '.join(when)}._"
    return f"{markdown(header, lines, left=2)}\n\n{stamp}{older_rows(rows, 'backend')}"


def is_ours(row: dict[str, Any]) -> bool:
    return row["backend"].partition(" ")[0] == "tilestack"


def figure(row: dict[str, Any]) -> str:
    return f"{row['figure']:,.{2 if row['figure'] < 100 else 0}f}"


def on_the_same_work(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that stand beside one: of the same workload on the same model."""
    return [other for other in rows if (other["case"], other.get("model")) == (row["case"], row.get("model"))]


def times_as_fast(row: dict[str, Any], peer: dict[str, Any]) -> float:
    """By their rates or times: the seconds of an older row may be those of another number of tokens."""
    return row["figure"] / peer["figure"] if row["unit"] == "tokens/s" else peer["figure"] / row["figure"]


def place_of(case: str) -> tuple[int, int]:
    """Where a workload stands in the table: by its kind, batches by their size."""
    kind, _, size = case.rpartition(" ") if case[-1:].isdigit() else (case, "", "0")
    return WORKLOAD_KINDS.index(kind) if kind in WORKLOAD_KINDS else len(WORKLOAD_KINDS), int(size)


def with_version(row: dict[str, Any]) -> str:
    """An engine's name with its version, of ours also the commit."""
    engine = row["backend"].partition(" ")[0]
    version = row["versions"].get(engine)
    if engine == "tilestack":
        return f"{row['backend']} {version + ' at ' if version else ''}{row['commit']}"
    return f"{row['backend']} {version or 'of a version not recorded'}"


def http(folder: Path, slug: str) -> str:
    """What the way over HTTP costs of the engine's throughput, a line for each model and number of processes."""
    from tilestack.lab.serving.bench_http import OFFLINE, TWO_PROCESSES, costs  # brings the engine along

    path = path_of(slug, "http", folder)
    if not path.exists():
        return not_measured("tilestack bench http --save", machine=slug)
    kept = read_json(path)
    rows = {(row["case"], row["backend"]): row for row in kept["rows"]}
    lines = []
    cpu = lambda row: f"{row['cpu_us']:,.0f}" if "cpu_us" in row else "–"
    for (case, way), (lost, added) in costs(kept["rows"]).items():
        plain, served = rows[case, OFFLINE], rows[case, way]
        name = case if is_current(plain) and is_current(served) else f"{case} {OLD}"
        more = "–" if added is None else f"**{added:.1%}**"
        lines.append([name, "two" if way == TWO_PROCESSES else "one", f"{plain['figure']:,.0f}", f"{served['figure']:,.0f}", f"{lost:.1%}", cpu(plain), cpu(served), more])  # fmt: skip
    header = [
        "model",
        "processes",
        "offline, tokens/s",
        "over HTTP",
        "less by",
        "offline, µs of CPU a token",
        "over HTTP",
        "more by",
    ]
    machine = kept["machine"]
    stamp = f"_Measured on {machine_name(machine)}, {machine['date'][:10]}._"
    return f"{markdown(header, lines, left=2)}\n\n{stamp}{older_rows(rows.values(), 'case')}"
