"""The plots of the report: the roofline, our kernels against peers and roofs, and host against kernel time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilestack.contract import operators
from tilestack.lab.contests import Contest, Result, mean_ratio
from tilestack.lab.report.page import MARKS, SERIES, Section, colour, empty, plot
from tilestack.lab.units import digits, microseconds, percent, times

BENCH = "tilestack bench --save"
KERNELS = "tilestack.kernels."
OTHERS = "others"


@dataclass(frozen=True)
class Units:
    """What a machine's rates are counted in, so that its figures have digits: thousands of a GPU's on a CPU."""

    bandwidth: str
    arithmetic: str
    factor: float  # from the TB/s and TFLOP/s that results hold

    def rate(self, contest: Contest, row: dict[str, Any]) -> str:
        """A row's rate in the unit of its roof: arithmetic where that is the limit, else bandwidth."""
        number, unit = (row["tflops"], self.arithmetic) if contest.compute_bound(row) else (row.get("tb_per_s"), self.bandwidth)  # fmt: skip
        return "–" if number is None else f"{digits(self.factor * number)} {unit}"


def units_of(run: Result) -> Units:
    return Units("GB/s", "GFLOP/s", 1e3) if run.slug == "cpu" else Units("TB/s", "TFLOP/s", 1.0)


def kernel_families() -> dict[str, str]:
    """Each operator's family as its kernels are filed, which is coarser than where operators are defined.

    The folders `hopper` and `cuda` hold second kernels of families that lie elsewhere; they name one only where nothing else does.
    """
    found: dict[str, str] = {}
    for operator in operators():
        for implementation in operator.implementations.values():
            folder, _, file = implementation.forward.__module__.removeprefix(KERNELS).partition(".")
            if not implementation.forward.__module__.startswith(KERNELS) or not file:
                continue
            if folder in ("hopper", "cuda"):
                found.setdefault(operator.name, file.partition("_")[0])
            else:
                found[operator.name] = folder
    return found


def hover(contest: Contest, row: dict[str, Any]) -> str:
    lines = [
        f"<b>{contest.name}</b>",
        f"{contest.label}, {contest.dtype}, {row['backend']}",
        f"{microseconds(row['time_us'])}, {units_of(contest.run).rate(contest, row)}, {percent(row.get('roof_fraction'))} of the roof",
    ]
    if row is contest.ours and contest.peer:
        lines.append(f"{times(contest.ratio)} {contest.peer['backend']} ({microseconds(contest.peer['time_us'])})")
    return "<br>".join(map(str, lines))


def roofline_section(found: Sequence[Contest], run: Result) -> Section:
    lede = "Each point is an operator on one set of arguments. The lines are the roofs, a large copy and large matmuls timed on the same machine; how close a point comes to them is what counts."
    title, units = "Roofline", units_of(run)
    shown = [(contest, row) for contest in found if (row := contest.shown) and row.get("tb_per_s")]
    placed = [(contest, row, row["tflops"] / row["tb_per_s"]) for contest, row in shown if row.get("tflops")]
    if not placed or not run.bandwidth or not run.rates:
        return Section(title, lede, empty("No measurements here. Run", BENCH))
    if missing := len(shown) - len(placed):
        lede += f" {missing} measurements do no arithmetic at all and have no place here."
    bandwidth, rates = units.factor * run.bandwidth, {name: units.factor * rate for name, rate in run.rates.items()}
    low = min(0.1, *(x / 2 for _, _, x in placed))
    best = max(rates.values())
    high = max(10 * best / bandwidth, *(x * 2 for _, _, x in placed))
    lines = [([low, best / bandwidth], [low * bandwidth, best])]
    lines += [([ceiling / bandwidth, high], [ceiling] * 2) for ceiling in rates.values()]
    data: list[dict[str, Any]] = [
        dict(type="scatter", mode="lines", x=xs, y=ys, hoverinfo="skip", showlegend=False, line=dict(color=colour("muted"), width=2))
        for xs, ys in lines
    ]  # fmt: skip
    left = low * (best / bandwidth / low) ** 0.3  # beside the slope, where few points are
    labels = [(left * 0.9, left * bandwidth, f"copy {digits(bandwidth)} {units.bandwidth}")]
    labels += [(high, ceiling, f"{names} {units.arithmetic}") for names, ceiling in ceilings(rates)]
    notes = [
        dict(
            x=math.log10(x), y=math.log10(y), text=words, showarrow=False, xanchor="right", yanchor="bottom",
            font=dict(color=colour("muted"), size=12),
        )
        for x, y, words in labels
    ]  # fmt: skip
    families = kernel_families()
    members: dict[str, list[tuple[Contest, dict[str, Any], float]]] = {}
    for entry in placed:
        members.setdefault(families.get(entry[0].op, OTHERS), []).append(entry)
    for index, family in enumerate(sorted(members, key=lambda name: (name == OTHERS, name))):
        mark = MARKS[index % len(MARKS)]
        data.append(
            dict(
                type="scatter", mode="markers", name=family, x=[x for _, _, x in members[family]],
                y=[units.factor * row["tflops"] for _, row, _ in members[family]],
                hovertext=[hover(contest, row) for contest, row, _ in members[family]], hoverinfo="text",
                marker=dict(
                    size=9, opacity=0.9, color=colour(SERIES[index % len(SERIES)]), line=dict(width=1),
                    symbol=[mark if contest.direction == "forward" else f"{mark}-open" for contest, _, _ in members[family]],
                ),
            )
        )  # fmt: skip
    layout = dict(
        xaxis=dict(type="log", title=dict(text="flops per byte"), dtick=1),
        yaxis=dict(type="log", title=dict(text=units.arithmetic), dtick=1),
        annotations=notes,
    )
    return Section(
        title, lede + " Filled marks are forward, hollow ones backward.", plot(data, layout, 540, "roofline")
    )


def ceilings(rates: dict[str, float]) -> list[tuple[str, float]]:
    """Matmul rates from the highest, as (names with their figures, height); those too close to tell apart share a label."""
    grouped: list[tuple[str, float]] = []
    for dtype, ceiling in sorted(rates.items(), key=lambda pair: -pair[1]):
        words = f"{dtype} {digits(ceiling)}"
        if grouped and ceiling > 0.6 * grouped[-1][1]:
            grouped[-1] = (f"{grouped[-1][0]}, {words}", grouped[-1][1])
        else:
            grouped.append((words, ceiling))
    return grouped


def bars(
    found: Sequence[Contest], value: Callable[[Contest], float | None], base: float,
    tone: Callable[[float], str], shown: Callable[[float | None], str], axis: dict[str, Any], label: str,
) -> str:  # fmt: skip
    """A bar per operator and direction at the mean of its cases, and a point for each case, so none can hide."""
    groups: dict[str, list[tuple[float, Contest]]] = {}
    for contest in found:
        if (number := value(contest)) is not None and number > 0:
            groups.setdefault(contest.name, []).append((number, contest))
    if not groups:
        return ""
    means = {name: mean_ratio([number for number, _ in members]) for name, members in groups.items()}
    names = sorted(means, key=lambda name: (means[name], name))
    points = [(name, number, contest) for name in names for number, contest in groups[name]]
    data: list[dict[str, Any]] = [
        dict(
            type="bar", orientation="h", y=names, x=[means[name] - base for name in names], base=base, width=0.62,
            marker=dict(color=[colour(tone(means[name])) for name in names], opacity=0.32), hoverinfo="skip", showlegend=False,
        ),
        dict(
            type="scatter", mode="markers", y=[name for name, _, _ in points], x=[number for _, number, _ in points],
            marker=dict(color=[colour(tone(number)) for _, number, _ in points], size=7, line=dict(width=1, color=colour("card"))),
            hovertext=[hover(contest, contest.ours) for _, _, contest in points if contest.ours], hoverinfo="text", showlegend=False,
        ),
    ]  # fmt: skip
    notes = [
        dict(
            x=1, xref="paper", y=name, text=f"<b>{shown(means[name])}</b>", showarrow=False, xanchor="left", xshift=8,
            font=dict(color=colour(tone(means[name]))),
        )
        for name in names
    ]  # fmt: skip
    layout = dict(
        xaxis=axis | dict(side="top"), annotations=notes, margin=dict(l=8, r=64, t=36, b=8), bargap=0.3,
        yaxis=dict(gridcolor="rgba(0,0,0,0)", dtick=1, range=[-0.6, len(names) - 0.4]),  # left alone, it leaves bands empty
        shapes=[dict(type="line", x0=1, x1=1, y0=0, y1=1, yref="paper", line=dict(color=colour("ink"), width=1.5))],
    )  # fmt: skip
    return plot(data, layout, 56 + 22 * len(names), label)


def peer_section(found: Sequence[Contest]) -> Section:
    title = "Against the fastest peer"
    lede = "How many times faster our fastest backend is than the fastest peer timed beside it (PyTorch's own operators, torch.compile, Liger). Left of 1 we lose. Bars are means over the cases, points the cases; where our backend runs a peer's kernel, nothing is compared."
    compared = [contest for contest in found if contest.ratio and not contest.borrowed]
    ratios = [contest.ratio for contest in compared if contest.ratio]
    if not ratios:
        return Section(title, lede, empty("No peer was timed beside our kernels. Run", BENCH))
    reach = 1.08 * max(0.2, *(abs(math.log10(ratio)) for ratio in ratios))  # as far to the left of 1 as to the right
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    axis = dict(type="log", range=[-reach, reach], tickvals=ticks, ticktext=[f"{tick:g}×" for tick in ticks])
    tone = lambda ratio: "muted" if round(ratio, 2) == 1 else "good" if ratio > 1 else "bad"  # as the label rounds
    return Section(title, lede, bars(compared, lambda contest: contest.ratio, 1.0, tone, times, axis, title))


def roof_section(found: Sequence[Contest]) -> Section:
    title = "How close to the roof"
    lede = "The least time the machine would need, for the bytes or the arithmetic that cannot be avoided, as a part of the time our fastest backend took."
    fraction = lambda contest: contest.ours["roof_fraction"]
    if above := [contest for contest in found if (fraction(contest) or 0) > 1.005]:
        lede += f" {len(above)} of {len(found)} lie above 100%: the roof of bandwidth is a large copy, half of it writes, and a kernel that mostly reads, or finds rows in the cache because they repeat, can be faster than that."
    axis = dict(tickformat=".0%", rangemode="tozero")
    drawn = bars(found, fraction, 0.0, lambda _: "blue", percent, axis, title)
    return Section(title, lede, drawn or empty("No roof was measured with these kernels. Run", BENCH))


def host_section(found: Sequence[Contest], run: Result) -> Section:
    lede = "What a call costs the host against what its kernels cost the GPU. Below the diagonal the GPU is kept busy; above it the host is the limit, unless a CUDA graph replays the call."
    title = "Host and kernel time"
    timed = [
        (contest, row) for contest in found for row in contest.timed if row.get("host_us") and row.get("how") != "cpu"
    ]
    if not timed:
        return Section(title, lede, empty("No host times here. On a machine with a GPU, run", BENCH))
    backends = list(dict.fromkeys(row["backend"] for _, row in timed))
    kernel, host = ([row[key] for _, row in timed] for key in ("time_us", "host_us"))
    ends = [min(kernel) / 1.5, max(kernel) * 1.5]
    diagonal = [ends[0], max(min(ends[1], max(host) * 2), ends[0])]  # not beyond what the points need
    data: list[dict[str, Any]] = [
        dict(type="scatter", mode="lines", x=diagonal, y=diagonal, name="host = kernel", hoverinfo="skip", line=dict(color=colour("muted"), dash="dot", width=1.5))
    ]  # fmt: skip
    if floor := run.roofs.get("host_floor_us"):
        data.append(dict(type="scatter", mode="lines", x=ends, y=[floor] * 2, name=f"least of a PyTorch call, {microseconds(floor)}", hoverinfo="skip", line=dict(color=colour("muted"), width=1.5)))  # fmt: skip
    for index, backend in enumerate(backends):
        members = [(contest, row) for contest, row in timed if row["backend"] == backend]
        data.append(
            dict(
                type="scatter", mode="markers", name=backend, x=[row["time_us"] for _, row in members], y=[row["host_us"] for _, row in members],
                hovertext=[f"{hover(contest, row)}<br>host {microseconds(row['host_us'])}" for contest, row in members], hoverinfo="text",
                marker=dict(size=8, opacity=0.85, color=colour(SERIES[index % len(SERIES)]), symbol=MARKS[index % len(MARKS)], line=dict(width=1, color=colour("card"))),
            )
        )  # fmt: skip
    layout = dict(
        xaxis=dict(type="log", title=dict(text="kernel µs"), dtick=1), yaxis=dict(type="log", title=dict(text="host µs a call"), dtick=1)
    )  # fmt: skip
    return Section(title, lede, plot(data, layout, 460, "host against kernel time"))
