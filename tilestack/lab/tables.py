"""Markdown tables generated from results/: what README and docs claim is what was measured.

A table stands between two markers and is rewritten in place by `make docs`:

    <!-- table: headline h200 -->                     one line per operator, its best case; of some with their names
    <!-- table: operator h200 softmax,rms_norm -->    every case of some operators, both directions
    <!-- table: training h200 -->                     whole training steps, ours and every peer's
    <!-- table: memory h200 stride -->                one sweep of `tilestack bench memory`, a line per setting
    <!-- /table -->

A loss is written like a win, in words. A table without results says "not measured yet".
"""

import re
from collections.abc import Callable
from pathlib import Path

from tilestack.lab import memory
from tilestack.lab.measured import Contest, contests, method, microseconds, percent, rate, results_under, times

OPENING = re.compile(r"^<!-- table: (?P<name>[^\n]*?) -->$", re.MULTILINE)
CLOSING = "<!-- /table -->"
TRAINING = "train"  # what rows of `tilestack bench train` have for an operator
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


class TableError(ValueError):
    """A marker that names no table; the message says where and what there is."""


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are words and the others numbers."""
    rules = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rules, *rows))


def against_peer(contest: Contest) -> str:
    """The ratio and the peer's name; a loss says so."""
    if contest.ratio is None or contest.peer is None:
        return "no peer" if contest.ours else "–"
    peer = contest.peer["backend"]
    if round(contest.ratio, 2) < 1:
        return f"{times(contest.ratio)} (slower than {peer})"
    return f"**{times(contest.ratio)}** {peer}" if round(contest.ratio, 2) > 1 else f"{times(contest.ratio)} {peer}"


def stamps(chosen: list[Contest]) -> str:
    """The line under a table: where, with what, when and how it was measured."""
    lines = []
    for run in {id(contest.run): contest.run for contest in chosen}.values():
        machine = run.machine
        rows = [row for contest in chosen if contest.run is run for row in contest.timed]
        commits = dict.fromkeys(row.get("commit") or machine.get("commit") for row in rows)
        known = [
            machine.get("gpu") or machine.get("cpu") or run.slug,
            *(f"{label} {machine[key]}" for label, key in (("torch", "torch"), ("Triton", "triton")) if machine.get(key)),
            *(f"commit {commit}" for commit in commits if commit),
            str(machine.get("date", ""))[:10],
            method(rows),
        ]  # fmt: skip
        lines.append(", ".join(filter(None, known)))
    return "_Measured on " + "; ".join(sorted(lines)) + "._"


def headline(found: list[Contest], names: str = "") -> str:
    """One line per operator, or per named one: the case closest to its roof, forward where it was timed, and how many
    cases are won."""
    rows, used = [], []
    for op in names.split(",") if names else dict.fromkeys(contest.op for contest in found if contest.op != TRAINING):
        ours = [contest for contest in found if contest.op == op and contest.ours]
        if not ours:
            continue
        first = [contest for contest in ours if contest.direction == "forward"] or ours
        best = max(first, key=lambda contest: contest.ours["roof_fraction"] or 0)  # type: ignore[index]
        row = best.ours
        assert row is not None
        met = [contest.ratio for contest in ours if contest.ratio is not None]
        won = f"{sum(ratio > 1 for ratio in met)} of {len(met)}" if met else "–"
        rows.append([f"`{op}`", f"{best.case} {best.dtype} {best.direction}", microseconds(row["time_us"]), rate(best, row), percent(row["roof_fraction"]), against_peer(best), microseconds(row["host_us"]), won])  # fmt: skip
        used += ours
    if not rows:
        return ""
    header = ["operator", "best case", "time", "rate", "of the roof", "against the best peer", "host", "cases won"]
    return markdown(header, rows, left=2) + "\n\n" + stamps(used)


def operator(found: list[Contest], names: str) -> str:
    """Every case of the named operators."""
    wanted = [name.strip() for name in names.split(",")]
    rows, used = [], []
    for contest in sorted((c for c in found if c.op in wanted), key=lambda c: wanted.index(c.op)):
        if (row := contest.ours) is None:
            continue
        rows.append([f"`{contest.op}`", contest.case, contest.dtype, contest.direction, microseconds(row["time_us"]), rate(contest, row), percent(row["roof_fraction"]), against_peer(contest), microseconds(row["host_us"])])  # fmt: skip
        used.append(contest)
    if not rows:
        return ""
    header = ["operator", "case", "dtype", "direction", "time", "rate", "of the roof", "against the best peer", "host"]
    return markdown(header, rows, left=4) + "\n\n" + stamps(used)


def training(found: list[Contest]) -> str:
    """Whole training steps: a line per candidate, fastest first."""
    rows, used = [], [contest for contest in found if contest.op == TRAINING]
    for contest in used:
        for row in sorted(contest.timed, key=lambda row: row["time_us"]):
            name = f"**{row['backend']}**" if row is contest.ours else row["backend"]
            ratio = "–" if row["ratio_to_best_peer"] is None else times(row["ratio_to_best_peer"])
            rows.append([contest.case, name, f"{row['tokens_per_s']:,.0f}", f"{row['time_us'] / 1e3:.1f} ms", f"{row['peak_mib'] / 1024:.1f} GiB", ratio])  # fmt: skip
    if not rows:
        return ""
    header = ["model, micro-batch", "trained by", "tokens/s", "step", "peak memory", "against the best peer"]
    return markdown(header, rows, left=2) + "\n\n" + stamps(used)


def sweep(folder: Path, slug: str, name: str) -> str:
    """One sweep over access patterns: the bandwidth of each candidate, and ours as a part of the copy roof."""
    if (run := memory.load(folder, slug)) is None:
        return ""
    points = [point for point in memory.points_of(run) if point.sweep == name and point.tb_per_s is not None]
    backends = list(dict.fromkeys(point.backend for point in points))
    found = {(point.setting, point.backend): point.tb_per_s for point in points}
    roof = run["roofs"].get("copy_tb_per_s")
    rows = []
    for setting in dict.fromkeys(point.setting for point in points):
        rates = [found.get((setting, backend)) for backend in backends]
        share = rates[0] / roof if rates[0] and roof else None
        rows.append([str(setting), *map(memory.rate, rates), percent(share)])
    if not rows:
        return ""
    machine = run["machine"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "triton", "commit"))
    how = method([{"how": point.how} for point in points])
    header = [memory.named(name).axis, *backends, f"{backends[0]}, of the roof"]
    stamp = f"_Measured on {machine['gpu'] or machine['cpu']}, {versions}, {machine['date'][:10]}, {how}._"
    return markdown(header, rows, left=0) + "\n\n" + stamp


TABLES: dict[str, Callable[..., str]] = {"headline": headline, "operator": operator, "training": training}
WORDS = {"headline": (1, 2), "operator": (2,), "training": (1,)}  # how many follow the name
USES = "`headline GPU [NAME,NAME]`, `operator GPU NAME,NAME`, `training GPU` and `memory GPU SWEEP`"


def table(name: str, root: Path, where: str = "") -> str:
    """The table a marker names, from the results under root."""
    kind, *words = name.split() or [""]
    place = f"{where}: " if where else ""
    if kind == "memory" and len(words) >= 2 and " ".join(words[1:]) in {sweep.name for sweep in memory.SWEEPS}:
        written = sweep(root / "results", words[0], " ".join(words[1:]))
        return (
            written
            or f"_not measured yet: `{memory.COMMAND}` on a machine with the GPU `{words[0]}` fills this table._"
        )
    if kind not in TABLES or len(words) not in WORDS[kind]:
        raise TableError(f"{place}no table is named {name!r}; there are {USES}")
    slug, *names = words
    runs = [run for run in results_under(root / "results") if run.slug == slug]
    written = TABLES[kind](contests(runs), *names)
    command = f"tilestack bench {'train ' if kind == 'training' else ''}--save"
    return written or f"_not measured yet: `{command}` on a machine with the GPU `{slug}` fills this table._"


def rewritten(text: str, root: Path, where: str) -> str:
    """A page with each of its tables generated anew; markers shown inside code fences are left alone."""
    fences = [match.span() for match in FENCE.finditer(text)]
    pieces, at = [], 0
    for opening in OPENING.finditer(text):
        if any(start <= opening.start() < end for start, end in fences):
            continue
        end = text.find(CLOSING, opening.end())
        following = OPENING.search(text, opening.end())
        if end < 0 or (following and following.start() < end):
            raise TableError(f"{where}: the table {opening['name']!r} is not closed by {CLOSING}")
        pieces += [text[at : opening.end()], "\n", table(opening["name"], root, where), "\n"]
        at = end
    return "".join(pieces) + text[at:]


def pages(root: Path) -> list[Path]:
    return [
        path for path in (*sorted(root.glob("README*.md")), *sorted((root / "docs").rglob("*.md"))) if path.exists()
    ]


def outdated(root: Path) -> dict[Path, str]:
    """The pages whose tables are not what the results say, with the text they should have."""
    fresh = {
        path: rewritten(path.read_text(encoding="utf-8"), root, str(path.relative_to(root))) for path in pages(root)
    }
    return {path: text for path, text in fresh.items() if text != path.read_text(encoding="utf-8")}


def stale_tables(root: Path) -> list[Path]:
    """The pages that `update_tables` would change."""
    return list(outdated(root))


def update_tables(root: Path) -> list[Path]:
    """Rewrite every generated table of README and docs; returns the files that changed."""
    changed = outdated(root)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return list(changed)
