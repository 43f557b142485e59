"""A run as a picture: for each latency, which share of requests or tokens took no longer."""

import html
import math
from collections.abc import Sequence
from typing import Any

from tilestack.lab.report.page import COLOURS
from tilestack.lab.serving.load.client import Outcome
from tilestack.lab.serving.load.figures import milliseconds, percentile
from tilestack.lab.units import digits

PANELS = {
    "ttft": ("time to first token", "blue"),
    "tpot": ("time per token after it", "violet"),
    "itl": ("between tokens", "teal"),
    "e2el": ("whole answer", "amber"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 220, 54, 64, 62
POINTS = 200  # of a curve


def latency_plot(outcomes: Sequence[Outcome], figures: dict[str, Any], title: str) -> str:
    """An SVG with a panel for each latency; the marks are the 50th, 90th and 99th percentile."""
    measured = {
        name: values for name, values in milliseconds([o for o in outcomes if o.error is None]).items() if values
    }
    wide, ink, muted = LEFT + len(PANELS) * (WIDTH + GAP), COLOURS["ink"][0], COLOURS["muted"][0]
    told = (
        f"{figures['completed']} of {figures['num_prompts']} requests in {figures['duration']:.1f} s · "
        f"{figures['output_throughput']:,.0f} output tokens/s · {figures['request_throughput']:.2f} requests/s"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{TOP + HEIGHT + 60}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="{COLOURS["card"][0]}"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600" fill="{ink}">{html.escape(title)}</text>',
        f'<text x="{LEFT}" y="44" fill="{muted}">{told}</text>',
    ]
    for place, (name, (words, tone)) in enumerate(PANELS.items()):
        left = LEFT + place * (WIDTH + GAP)
        parts.append(f'<g transform="translate({left} {TOP})">{panel(measured.get(name, []), name, words, tone)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(values: Sequence[float], name: str, words: str, tone: str) -> str:
    """The distribution of one latency, on a logarithmic scale of milliseconds."""
    ink, muted, rule, line = (COLOURS[each][0] for each in ("ink", "muted", "rule", tone))
    label = (
        f'<text y="{HEIGHT + 40}" x="{WIDTH / 2}" text-anchor="middle" fill="{ink}">{name.upper()}: {words}, ms</text>'
    )
    if not values:
        return (
            f'{label}<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="{muted}">nothing measured</text>'
        )
    scale = ticks(percentile(values, 0.5), values[-1])
    low, high = math.log10(scale[0]), math.log10(scale[-1])
    across = lambda value: WIDTH * max(0.0, (math.log10(max(value, scale[0])) - low) / (high - low))
    up = lambda percent: HEIGHT * (1 - percent / 100)
    drawn = [label]
    for percent in (0, 25, 50, 75, 100):
        drawn.append(f'<line x2="{WIDTH}" y1="{up(percent)}" y2="{up(percent)}" stroke="{rule}"/>')
        drawn.append(f'<text x="-6" y="{up(percent) + 4}" text-anchor="end" fill="{muted}">{percent}%</text>')
    for tick in scale:
        drawn.append(f'<line x1="{across(tick):.1f}" x2="{across(tick):.1f}" y2="{HEIGHT}" stroke="{rule}"/>')
        drawn.append(
            f'<text x="{across(tick):.1f}" y="{HEIGHT + 18}" text-anchor="middle" fill="{muted}">{tick:,g}</text>'
        )
    curve = [(percentile(values, 100 * point / POINTS), 100 * point / POINTS) for point in range(POINTS + 1)]
    path = " ".join(f"{across(value):.1f},{up(percent):.1f}" for value, percent in curve)
    drawn.append(f'<polyline points="{path}" fill="none" stroke="{line}" stroke-width="2"/>')
    for percent in (50, 90, 99):
        value = percentile(values, percent)
        side, anchor = (8, "start") if across(value) < WIDTH / 3 else (-8, "end")
        drawn.append(f'<circle cx="{across(value):.1f}" cy="{up(percent):.1f}" r="4" fill="{line}"/>')
        drawn.append(
            f'<text x="{across(value) + side:.1f}" y="{up(percent) + 14:.1f}" fill="{ink}" text-anchor="{anchor}">'
            f"p{percent} {digits(value)}</text>"
        )
    return "".join(drawn)


def ticks(least: float, most: float) -> list[float]:
    """1, 2, 5, 10, … around what was measured; thinned out where it spans several powers of ten."""
    tens = range(math.floor(math.log10(max(least, 1e-3))), math.ceil(math.log10(max(most, 1e-3))) + 1)
    every = [round(step * 10.0**ten, 6) for ten in tens for step in ((1, 2, 5) if len(tens) < 4 else (1,))]
    first = max((place for place, tick in enumerate(every) if tick <= least), default=0)
    last = min((place for place, tick in enumerate(every) if tick >= most), default=len(every) - 1)
    return every[first : max(last, first + 1) + 1]
