"""The report: one html file that shows what was proved and what was measured, losses as large as wins."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tilestack.lab.contests import Contest, Result, contests, mean_ratio, score
from tilestack.lab.labels import case_label
from tilestack.lab.proof.proofs import COMMAND
from tilestack.lab.report.page import Part, Section, cards, empty, table, text, write_page
from tilestack.lab.report.plots import (
    BENCH,
    Units,
    host_section,
    peer_section,
    roof_section,
    roofline_section,
    units_of,
)
from tilestack.lab.results import machine_name, same_machine
from tilestack.lab.rows import FASTER, SLOWER
from tilestack.lab.units import digits, microseconds, percent, times

NOTHING = '<span class="muted">–</span>'  # in a cell
FACTS = {
    "gpu": "GPU", "cpu": "CPU", "driver": "driver", "torch": "torch", "triton": "Triton", "python": "Python",
    "commit": "commit", "date": "date, UTC",
}  # fmt: skip


def write_report(
    path: Path | str, results: Sequence[Result], proofs: Sequence[dict[str, Any]], machine: dict[str, Any],
    sections: Sequence[Section] = (), kept_proofs: Mapping[str, Section] | None = None,
) -> Path:  # fmt: skip
    """Write the page on a machine. Proofs and further sections were made here, so they stand under its name; results
    stand under the name of the machine that each file says it was measured on, and so do proofs kept of one, by slug."""
    slugs = sorted({run.slug for run in results}, key=lambda slug: (slug == "cpu", slug))
    kept_here = (kept_proofs or {}).get(machine.get("slug", ""))
    shown = [] if kept_here and not proofs else [proof_section(proofs)]
    figures, here, elsewhere = proof_cards(proofs), [*shown, *filter(None, [kept_here])], []
    for slug in slugs:
        runs = [run for run in results if run.slug == slug]
        newest = max(runs, key=lambda run: run.machine.get("date", ""))
        found, kept = contests(runs), (kept_proofs or {}).get(slug)
        if same_machine(newest.machine, machine):
            figures += glance(found)
            here += measured_sections(found, newest)
        else:
            elsewhere.append(measured_elsewhere(found, runs, newest, kept))
    mine = Part("This machine", f"What was proved, measured and made on {name_of_machine(machine)}, where this page was written.", facts_of(machine), cards(figures), [*here, *sections])  # fmt: skip
    content: list[Section | Part] = [mine, *elsewhere]
    if not any(run.machine.get("gpu") for run in results):
        content.append(Section("On a GPU", "Against the fastest peer, how close to the roof, host and kernel time: kernels are measured where they are meant to run.", empty("No GPU results here. On a machine with one, run", BENCH)))  # fmt: skip
    subtitle = "Each operator is a definition in plain PyTorch and kernels that replace it: proved against float64, held against the machine's measured roofs and against the fastest peer in the same run."
    written = [("written on", name_of_machine(machine)), ("written at, UTC", minute(machine))]
    if elsewhere:
        written.insert(1, ("with saved figures of", ", ".join(part.title.removeprefix("On ") for part in elsewhere)))
    return write_page(Path(path), "Proved right, measured honestly", subtitle, written, "", content)


def name_of_machine(machine: dict[str, Any]) -> str:
    return str(machine_name(machine) or machine.get("slug") or "a machine that left no name")


def minute(machine: dict[str, Any]) -> str:
    """When a stamp was made, to the minute."""
    return str(machine.get("date", ""))[:16].replace("T", " ")


def facts_of(machine: dict[str, Any], runs: Sequence[Result] = ()) -> list[tuple[str, str]]:
    """What a machine's figures were made with; of several runs, every commit and the span of dates."""
    rows = [row for run in runs for row in run.rows]
    commits = list(dict.fromkeys(str(row["commit"]) for row in rows if row.get("commit")))
    dates = sorted(str(row["date"])[:10] for row in rows if row.get("date"))
    stamp = machine | {"date": minute(machine)}
    if len(commits) > 1:
        stamp["commit"] = ", ".join(commits)
    if dates and dates[0] != dates[-1]:
        stamp["date"] = f"{dates[0]} to {dates[-1]}"
    return [(label, stamp[key]) for key, label in FACTS.items() if stamp.get(key)]


def measured_elsewhere(
    found: Sequence[Contest], runs: Sequence[Result], newest: Result, proved: Section | None
) -> Part:
    """The results of another machine than the one the page is written on, under that machine's name and versions."""
    lede = "Measured there and saved with the code, not on the machine this page was written on."
    return Part(f"On {name_of_machine(newest.machine)}", lede, facts_of(newest.machine, runs), cards(glance(found)), [*filter(None, [proved]), *measured_sections(found, newest)])  # fmt: skip


def proof_cards(proofs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    tried = [proof for proof in proofs if proof["ok"] is not None]
    failed = sum(not proof["ok"] for proof in tried)
    if failed:
        return [(f"{failed:,}", f"of {len(tried):,} proofs fail", "bad")]
    return [(f"{len(tried):,}", "proofs, none fails", "good")] if tried else []


def glance(found: Sequence[Contest]) -> list[tuple[str, str, str]]:
    """The few figures of a machine that come before everything else."""
    facts = []
    if ratios := [contest.ratio for contest in found if contest.ratio is not None and not contest.borrowed]:
        counted, mean = score(contest.verdict for contest in found), mean_ratio(ratios)
        facts.append((times(mean), "the fastest peer's speed, geometric mean", "good" if mean >= 1 else "bad"))
        others = f"cases won, {counted.lost} lost, {counted.equal} equal"
        facts.append((f"{counted.won} of {counted.met}", others, "bad" if 2 * counted.lost > counted.met else ""))
    if roofs := [row["roof_fraction"] for contest in found if (row := contest.ours) and row.get("roof_fraction")]:
        facts.append((percent(median(roofs)), "of the machine's roof, median", ""))
    return facts


def proof_section(proofs: Sequence[dict[str, Any]]) -> Section:
    lede = "An implementation's error may be at most twice that of the definition in the same dtype, plus one unit in the last place; the truth is the definition in float64."
    tried = [proof for proof in proofs if proof["ok"] is not None]
    if not tried:
        return Section("Proofs", lede, empty("No proofs here. Run", COMMAND))
    failures = [proof for proof in tried if not proof["ok"]]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for proof in sorted(tried, key=lambda proof: bool(proof["ok"])):
        groups.setdefault(tuple(proof[key] for key in ("op", "backend", "dtype", "direction")), []).append(proof)
    rows = []
    for (op, backend, dtype, direction), members in groups.items():
        wrong = sum(not proof["ok"] for proof in members)
        worst = max(map(share_of_bound, members))
        meter = f'<span class="meter"><i{" class=bad" if worst > 1 else ""} style="width:{100 * min(worst, 1):.0f}%"></i></span>'
        outcome = f'<b class="bad">{wrong} of {len(members)} fail</b>' if wrong else '<b class="good">holds</b>'
        bounded = worst > 0 or any(proof["bound"] for proof in members)  # gradcheck has no bound of ours
        used = "infinite" if math.isinf(worst) else percent(worst if bounded else None)
        rows.append([text(op), text(backend), text(dtype), text(direction), (outcome, -wrong), (len(members), len(members)), (used + meter, min(worst, 1e9))])  # fmt: skip
    listed = "".join(
        f"<li><b>{text(p['op'])}</b> on {text(p['backend'])}, {text(case_label(p['op'], p['case']))}, {text(p['variant'])}, {text(p['dtype'])} {text(p['direction'])}: {text(p['message'] or 'error beyond its bound')}</li>"
        for p in failures
    )
    heading = f"{len(failures)} of {len(tried)} proofs fail"
    before = f'<div class="failures"><h3>{heading}</h3><ul>{listed}</ul></div>' if failures else ""
    untried = len(proofs) - len(tried)
    aside = f" Not tried, being the definition itself or nothing the backend takes: {untried:,}." if untried else ""
    header = ["operator", "backend", "dtype", "direction", "outcome", "proofs", "largest error, of what is allowed"]
    return Section("Proofs", lede + aside, before + table(header, rows, left=5, filtered=True))


def share_of_bound(proof: dict[str, Any]) -> float:
    """The error as a part of what was allowed; more than one fails."""
    error, bound = proof["error"] or 0.0, proof["bound"] or 0.0
    if not math.isfinite(error) or (error and not bound):
        return math.inf
    return error / bound if bound else 0.0


def measured_sections(found: Sequence[Contest], newest: Result) -> list[Section]:
    """The plots of one machine; those about our kernels only where some were timed."""
    ours = [contest for contest in found if contest.ours]
    about_ours = [peer_section(ours), roof_section(ours), host_section(found, newest)]
    return [roofline_section(found, newest), *(about_ours if ours else []), table_section(found, units_of(newest))]


def table_section(found: Sequence[Contest], units: Units) -> Section:
    lede = "Medians, with the interquartile range as spread. Click a header to sort; type words to filter."
    rows = [
        measurement(contest, row, units)
        for contest in found
        for row in sorted(contest.rows, key=lambda row: (row.get("time_us") is None, row.get("time_us")))
    ]
    # What no row has is left out: a page is only so wide.
    header = [name for name in (rows[0] if rows else ()) if any(cells[name] != NOTHING for cells in rows)]
    shown = table(header, [[cells[name] for name in header] for cells in rows], left=3, filtered=True)
    return Section("Every measurement", lede, shown if rows else empty("No measurements here. Run", BENCH))


def measurement(contest: Contest, row: dict[str, Any], units: Units) -> dict[str, Any]:
    """The cells of one row by their headings."""
    number = lambda key, shown: (shown(row[key]), row[key]) if row.get(key) is not None else NOTHING
    scaled = lambda value: digits(units.factor * value)
    against: Any = number("ratio_to_best_peer", times)
    if row is contest.ours and contest.ratio is not None:
        tone = {FASTER: "good", SLOWER: "bad"}.get(contest.verdict, "muted")
        said = "" if contest.verdict in (FASTER, SLOWER) else f" <small>{contest.verdict}</small>"
        against = (f'<b class="{tone}">{times(contest.ratio)}{said}</b>', contest.ratio)
    alone = contest.only(row["backend"])
    old = f"older source, {alone.commit}" if alone.stale else ""
    notes = "; ".join(filter(None, (row.get("note"), old)))
    return {
        "operator": f"{text(contest.op)} <small>{text(contest.direction)}</small>",
        "case": f'<span class="case">{text(contest.label)}</span> <small>{text(contest.dtype)}</small>',
        "backend": text(row["backend"]),
        "time": number("time_us", microseconds),
        "spread": number("spread", lambda value: f"{100 * value:.1f}%"),
        "host": NOTHING
        if row.get("how") == "cpu"
        else number("host_us", microseconds),  # on a CPU it is the time itself
        units.bandwidth: number("tb_per_s", scaled),
        units.arithmetic: number("tflops", scaled),
        "of roof": number("roof_fraction", percent),
        "× best peer": against,
        "peak MiB": number("peak_mib", "{:,.0f}".format),
        "note": f'<span class="note">{text(notes)}</span>' if notes else NOTHING,
    }
