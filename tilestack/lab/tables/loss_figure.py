"""Loss curves of `tilestack parity --fp8` as a picture for the guides: a panel per run, two in a row.

    panel:   loss ┤▓                      a wide pale line: the recipe's own precision
                  ┤ ▓▓▓▓▓▓▓▓▓▓▓▓▓▓        on it a thin one: fp8
                  └──────────────── step

It is drawn from results/<machine>/parity/fp8.json into docs/figures/fp8_loss_<machine>.svg by `make docs`, like the tables.
"""

import html
import itertools
import math
from typing import Any

from tilestack.lab.report.page import COLOURS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 350, 170, 44, 18, 46, 30  # of a panel, and around it
COLUMNS = 2
TONES = {"reference": "blue", "candidate": "amber"}


def loss_figure(kept: dict[str, Any]) -> str:
    """The runs of a file as SVG, in the reader's colours, light or dark."""
    rows = -(-len(kept["runs"]) // COLUMNS)
    panel_width, panel_height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BELOW
    wide, high = COLUMNS * panel_width, rows * panel_height
    described = "Loss against step, trained in " + " and in ".join(ways_of_run(kept["runs"][0])) + "."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img">',
        f"<title>{html.escape(described)}</title>",
        f"<desc>{html.escape('; '.join(map(ends_in_words, kept['runs'])))}</desc>",
        f"<style>text{{font:12px ui-sans-serif,system-ui,sans-serif}}{style(0)}@media(prefers-color-scheme:dark){{{style(1)}}}</style>",
        '<rect class="card" width="100%" height="100%"/>',
    ]
    for place, run in enumerate(kept["runs"]):
        x, y = LEFT + place % COLUMNS * panel_width, TOP + place // COLUMNS * panel_height
        parts.append(f'<g transform="translate({x} {y})">{panel(run)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ends_in_words(run: dict[str, Any]) -> str:
    """Where both curves of a run begin and end."""
    ends = lambda curve: f"from {curve[0]:.2f} to {curve[-1]:.2f}"
    first, second = ways_of_run(run)
    return (
        f"in {first} {ends(run['reference'])} and in {second} {ends(run['candidate'])}, {len(run['reference'])} steps"
    )


def ways_of_run(run: dict[str, Any]) -> tuple[str, str]:
    return run["against"], "fp8"


def style(scheme: int) -> str:
    """The classes of the picture, in light colours or in dark ones."""
    shade = {name: pair[scheme] for name, pair in COLOURS.items()}
    lines = "".join(
        f".{way}{{stroke:{shade[tone]};fill:none}}.{way}-name{{fill:{shade[tone]}}}" for way, tone in TONES.items()
    )
    return (
        f".card{{fill:{shade['card']}}}.ink{{fill:{shade['ink']}}}.muted{{fill:{shade['muted']}}}.rule{{stroke:{shade['rule']}}}"
        f"{lines}.reference{{stroke-width:3.5;stroke-opacity:.45}}.candidate{{stroke-width:1.1}}"
    )


def panel(run: dict[str, Any]) -> str:
    """Both curves of a run over its steps."""
    both = [*run["reference"], *run["candidate"]]
    steps, scale = len(run["reference"]), ticks(min(both), max(both))
    across = lambda step: WIDTH * step / steps
    up = lambda loss: HEIGHT * (scale[-1] - loss) / (scale[-1] - scale[0])
    model, *settings = run["name"].split(", ")
    drawn = [
        f'<text class="ink" y="-28">{html.escape(model)}: loss by step</text>',
        f'<text class="muted" y="-12">{html.escape(", ".join(settings))}</text>',
    ]
    for tick in scale:
        drawn.append(f'<line class="rule" x2="{WIDTH}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        drawn.append(f'<text class="muted" x="-6" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(0, steps):
        if tick <= steps:
            drawn.append(
                f'<text class="muted" x="{across(tick):.1f}" y="{HEIGHT + 18}" text-anchor="middle">{tick:g}</text>'
            )
    for place, (way, name) in enumerate(zip(TONES, ways_of_run(run), strict=True)):
        points = " ".join(f"{across(step):.1f},{up(loss):.1f}" for step, loss in enumerate(run[way], 1))
        drawn.append(f'<polyline class="{way}" points="{points}"/>')
        drawn.append(f'<text class="{way}-name" x="{WIDTH}" y="{16 + 16 * place}" text-anchor="end">{name}</text>')
    return "".join(drawn)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or below the lowest to at or above the highest, `most` of them at most."""
    high = max(high, low + 1e-3)
    powers = itertools.count(math.floor(math.log10(high - low)) - 1)
    steps = (digit * 10.0**power for power in powers for digit in (1, 2, 5))
    step = next(step for step in steps if math.ceil(high / step) - math.floor(low / step) < most)
    return [round(number * step, 9) for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
