"""Tables of contests: operators, layers and training steps, ours beside every peer, and the roofs of the machine.

A loss is written like a win, in words, and what was measured on an older source has a dagger.
"""

from collections.abc import Iterable
from typing import Any

from tilestack.lab.bench.peers import is_peer
from tilestack.lab.contests import Contest, Means, means, method, rate, score
from tilestack.lab.results import machine_name
from tilestack.lab.rows import EQUAL, FASTER, SAME_KERNEL, SLOWER, UNCLEAR
from tilestack.lab.stale import LAYER, TRAINING, is_current
from tilestack.lab.tables.markdown import OLD, commits_in_words, daggers, markdown
from tilestack.lab.training.bench_layers import CANDIDATES as OF_LAYERS
from tilestack.lab.training.bench_train import CANDIDATES
from tilestack.lab.units import microseconds, percent, times

NO_QUALITY = ["–", "–"]
VERSIONS = {"torch": "torch", "Triton": "triton", "cuDNN": "cudnn", "Liger": "liger", "transformers": "transformers"}


def against_peer(contest: Contest) -> str:
    """The ratio and the peer's name, with a loss, a draw or a borrowed kernel said in words."""
    if contest.ratio is None or contest.peer is None:
        return "–" if not contest.ours else "no peer" if contest.usual_code_tried else "usual code not timed"
    shown, peer = times(contest.ratio), contest.peer["backend"]
    return {
        FASTER: f"**{shown}** {peer}",
        SLOWER: f"{shown} (slower than {peer})",
        EQUAL: f"{shown} (equal to {peer})",
        UNCLEAR: f"{shown} (unclear against {peer}: the rounds differ too much)",
        SAME_KERNEL: f"{shown} {peer} (no win: this is {contest.borrowed}'s kernel)",
    }[contest.verdict]


def quality(row: dict[str, Any]) -> list[str]:
    """What quantising costs (quality.py): cells of a table, dashes where a row says nothing of it."""
    if row.get("cosine") is None:
        return NO_QUALITY
    return [f"{row['cosine']:.5f}", f"{row['relative_error']:.2%}"]


def marked(name: str, chosen: Iterable[Contest]) -> str:
    """A name, with a dagger where a figure beside it was measured on an older source."""
    return f"{name} {OLD}" if any(contest.stale for contest in chosen) else name


def older(chosen: Iterable[Contest]) -> str:
    """The line that says what the daggers mean, and at which commit what they mark was measured."""
    return daggers((contest.commit, f"`{contest.op}`") for contest in chosen if contest.stale)


def stamps(chosen: list[Contest]) -> str:
    """The line under a table: where, with what, when and how it was measured."""
    lines = []
    for run in {id(contest.run): contest.run for contest in chosen}.values():
        machine = run.machine
        rows = [row for contest in chosen if contest.run is run for row in contest.timed]
        commits = [row.get("commit") or machine.get("commit") or "" for row in rows]
        known = [
            machine_name(machine) or run.slug,
            *(f"{label} {machine[key]}" for label, key in VERSIONS.items() if machine.get(key)),
            commits_in_words(commits) if any(commits) else "",
            str(machine.get("date", ""))[:10],
            method(rows),
        ]  # fmt: skip
        lines.append(", ".join(filter(None, known)))
    return "_Measured on " + "; ".join(sorted(lines)) + "._"


def headline(found: list[Contest], names: str = "") -> str:
    """One line per operator, or per named one: the case closest to its roof, forward where it was timed, and how many
    cases are won."""
    rows, used = [], []
    for op in (
        names.split(",")
        if names
        else dict.fromkeys(contest.op for contest in found if contest.op not in (LAYER, TRAINING))
    ):
        ours = [contest for contest in found if contest.op == op and contest.ours]
        if not ours:
            continue
        first = [contest for contest in ours if contest.direction == "forward"] or ours
        best = max(first, key=lambda contest: contest.ours["roof_fraction"] or 0)  # type: ignore[index]
        row = best.ours
        assert row is not None
        rows.append([marked(f"`{op}`", ours), f"{best.label}, {best.dtype} {best.direction}", microseconds(row["time_us"]), rate(best, row), percent(row["roof_fraction"]), against_peer(best), microseconds(row["host_us"]), str(score(contest.verdict for contest in ours))])  # fmt: skip
        used += ours
    if not rows:
        return ""
    header = ["operator", "best case", "time", "rate", "of the roof", "against the best peer", "host", "cases won"]
    return markdown(header, rows, left=2) + "\n\n" + stamps(used) + older(used)


def operator(found: list[Contest], names: str) -> str:
    """Every case of the named operators."""
    wanted = [name.strip() for name in names.split(",")]
    rows, used = [], []
    for contest in sorted((c for c in found if c.op in wanted), key=lambda c: wanted.index(c.op)):
        if (row := contest.ours) is None:
            continue
        rows.append([marked(f"`{contest.op}`", [contest]), contest.label, contest.dtype, contest.direction, microseconds(row["time_us"]), rate(contest, row), percent(row["roof_fraction"]), against_peer(contest), microseconds(row["host_us"]), *quality(row)])  # fmt: skip
        used.append(contest)
    if not rows:
        return ""
    header = ["operator", "case", "dtype", "direction", "time", "rate", "of the roof", "against the best peer", "host"]
    if all(row[-2:] == NO_QUALITY for row in rows):
        rows = [row[:-2] for row in rows]
    else:
        header += ["cosine", "relative error"]
    summary = means(used)
    named = [*used, *(contest for mean in summary for contest in mean.contests)]
    return markdown(header, rows, left=4) + over_cases(summary) + "\n\n" + stamps(used) + older(named)


def over_cases(found: list[Means]) -> str:
    """What the cases of operators come to against the best peer of each: a line per backend of ours."""
    if not found:
        return ""
    rows = [
        [marked(f"`{mean.op}`", mean.contests), mean.dtype, mean.direction, mean.backend, mean.cases, times(mean.mean), f"{times(mean.worst.ratio)} ({mean.worst.label})"]
        for mean in found
    ]  # fmt: skip
    header = ["operator", "dtype", "direction", "backend", "cases", "geometric mean against the best peer", "least"]
    return "\n\n" + markdown(header, rows, left=4)


def ladder(found: list[Contest], op: str, names: str) -> str:
    """The rates of the named backends side by side, a line for each case that at least two of them were timed on, each with a
    dagger of its own. One that was timed on none of those has no column; a line below the table names it."""
    wanted = names.split(",")
    chosen = []
    for contest in (c for c in found if c.op == op):
        by_backend = {row["backend"]: row for row in contest.timed if row["backend"] in wanted}
        if len(by_backend) > 1:
            chosen.append((contest, by_backend))
    if not chosen:
        return ""
    timed = [name for name in wanted if any(name in by_backend for _, by_backend in chosen)]
    rows = []
    for contest, by_backend in chosen:
        rates = [
            marked(rate(contest, by_backend[name]), [contest.only(name)]) if name in by_backend else "–"
            for name in timed
        ]
        rows.append([contest.label, contest.dtype, contest.direction, *rates])
    header = ["case", "dtype", "direction", *(f"`{name}`" for name in timed)]
    untimed = ", ".join(f"`{name}`" for name in wanted if name not in timed)
    note = f"\n\n_Not measured yet: {untimed}._" if untimed else ""
    used = [contest for contest, _ in chosen]
    rungs = [contest.only(name) for contest, by_backend in chosen for name in by_backend]
    return markdown(header, rows, left=3) + note + "\n\n" + stamps(used) + older(rungs)


def layers(found: list[Contest]) -> str:
    """A decoder's layers: a line per layer and direction, the times of all candidates side by side."""
    rows, used = [], [contest for contest in found if contest.op == LAYER]
    names = [name for name in OF_LAYERS if any(row["backend"] == name for contest in used for row in contest.timed)]
    for contest in used:
        by_name = {row["backend"]: row for row in contest.timed}
        cells = [microseconds(by_name[name]["time_us"]) if name in by_name else "–" for name in names]
        roof = percent(contest.ours["roof_fraction"]) if contest.ours else "–"
        rows.append([marked(contest.label, [contest]), contest.dtype, contest.direction, *cells, roof, against_peer(contest)])  # fmt: skip
    if not rows:
        return ""
    header = ["layer, model, micro-batch", "dtype", "direction", *names, "of the roof", "against the best peer"]
    return markdown(header, rows, left=3) + "\n\n" + stamps(used) + older(used)


def training(found: list[Contest]) -> str:
    """Whole training steps: a line per candidate, fastest first, then those that failed and those that were not tried."""
    rows, used = [], [contest for contest in found if contest.op == TRAINING]
    is_old = lambda row: not is_peer(row["backend"]) and not is_current(row)
    for contest in used:
        case = contest.label
        for row in contest.timed:
            name = f"**{row['backend']}**" if row is contest.ours else row["backend"]
            name += f" {OLD}" if is_old(row) else ""
            ratio = "–" if row["ratio_to_best_peer"] is None else times(row["ratio_to_best_peer"])
            ratio += f" ({contest.verdict})" if row is contest.ours and contest.verdict in (EQUAL, UNCLEAR) else ""
            losses = [row.get(key) for key in ("first_loss", "last_loss")]
            loss = " → ".join(f"{value:.3f}" for value in losses) if None not in losses else "not recorded"
            peak = f"{row['peak_mib'] / 1024:.1f} GiB" if row["peak_mib"] else "–"
            rows.append([case, name, f"{row['tokens_per_s']:,.0f}", f"{row['time_us'] / 1e3:.1f} ms", peak, loss, ratio])  # fmt: skip
        failed = [row for row in contest.rows if not row["time_us"]]
        rows += [[case, row["backend"], row["note"].replace("|", "/"), "–", "–", "–", "–"] for row in failed]
        tried = {row["backend"] for row in contest.rows} | {
            name for row in contest.rows for name in row.get("tried", ())
        }
        if untried := [name for name in CANDIDATES if name not in tried]:
            rows.append([case, f"not tried: {', '.join(untried)}", "–", "–", "–", "–", "–"])
    if not rows:
        return ""
    header = ["model, micro-batch", "trained by", "tokens/s", "step", "peak memory", "loss, first to last step", "against the best peer"]  # fmt: skip
    old = daggers((row["commit"], contest.label) for contest in used for row in contest.timed if is_old(row))
    return markdown(header, rows, left=2) + "\n\n" + stamps(used) + old


def roofs(found: list[Contest]) -> str:
    """What the machine can do at best, as its last run measured it."""
    if not found:
        return ""
    run = max((contest.run for contest in found), key=lambda run: run.machine.get("date", ""))
    rows = [["copy, read and written", f"{run.bandwidth:.2f} TB/s"]] if run.bandwidth else []
    rows += [[f"matrix product in {dtype}", f"{value:.0f} TFLOP/s"] for dtype, value in run.rates.items()]
    if floor := run.roofs.get("host_floor_us"):
        rows.append(["host time of a trivial PyTorch call", microseconds(floor)])
    known = [run.machine.get(key) for key in ("gpu", "commit", "date")]
    return markdown(["roof", "measured"], rows) + f"\n\n_Measured on {', '.join(str(fact) for fact in known if fact)}._"
