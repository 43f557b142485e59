"""One self-contained page: sections in order, plots drawn by an inlined plotly.js, tables that sort and filter.

A part of the project that wants to be in the report builds a Section from `plot`, `table` and `empty` and hands it
over; nothing here knows what it shows. Colours are named in COLOURS with their counterpart for dark readers.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from tilestack.extras import MissingExtra, install_command
from tilestack.files import write_text_whole

MARK = b"measured or proved by the code it describes; this file loads nothing"  # which is in all pages
COLOURS = {  # name: (light, dark)
    "ink": ("#1d2330", "#e9ebf1"),
    "muted": ("#626a7c", "#9ba3b5"),
    "rule": ("#e1e4eb", "#2b303c"),
    "card": ("#fefeff", "#181b22"),
    "good": ("#2a8f6d", "#4cc3a0"),
    "bad": ("#d1483c", "#f07a70"),
    "blue": ("#3f74d8", "#6f9df1"),
    "amber": ("#c97d12", "#eaaa45"),
    "violet": ("#7d5bd1", "#ab90f1"),
    "teal": ("#17899c", "#4fbfd1"),
    "rose": ("#c2437f", "#ec83b3"),
    "olive": ("#7c8a1c", "#b9c750"),
    "brown": ("#7a4a2b", "#c79a78"),
    "sky": ("#4aa8e0", "#8fd0ff"),
    "navy": ("#23356e", "#c3cdfb"),
    "lime": ("#4f9d2d", "#86d95f"),
}
# For things without a colour of their own: neighbours in the list are far apart in hue, and the marks differ as well.
SERIES = ("blue", "amber", "violet", "lime", "rose", "teal", "brown", "sky", "olive", "navy")
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "triangle-down", "star", "hexagon")


@dataclass(frozen=True)
class Section:
    """A titled part of the page: one sentence that says what to see, and html."""

    title: str
    lede: str
    body: str

    @property
    def anchor(self) -> str:
        return anchor_of(self.title)


@dataclass(frozen=True)
class Part:
    """Sections that belong together, such as one machine's: a heading with facts of its own, and large figures."""

    title: str
    lede: str
    facts: Sequence[tuple[str, str]]
    top: str
    sections: Sequence[Section]

    @property
    def anchor(self) -> str:
        return anchor_of(self.title)


def anchor_of(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def colour(name: str) -> str:
    return COLOURS[name][0]


def text(value: object) -> str:
    return html.escape(str(value))


def empty(words: str, command: str = "") -> str:
    """What stands in for a figure that has nothing to show, and the command that would fill it."""
    return f'<p class="empty">{text(words)}' + (f" <code>{text(command)}</code>" if command else "") + "</p>"


def plot(data: Sequence[dict[str, Any]], layout: dict[str, Any], height: int, label: str) -> str:
    """A plotly figure from its traces and layout, in the page's look; misspelt properties raise."""
    objects = _plotly().graph_objects
    axis = dict(
        gridcolor=colour("rule"), zerolinecolor=colour("rule"), linecolor=colour("rule"), automargin=True, ticks=""
    )  # fmt: skip
    shared: dict[str, Any] = dict(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font=dict(family="Inter, system-ui, sans-serif", size=13, color=colour("ink")),
        margin=dict(l=8, r=16, t=8, b=8),
        hoverlabel=dict(bgcolor=colour("card"), bordercolor=colour("rule"), font=dict(color=colour("ink"))),
        legend=dict(orientation="h", x=0, y=1.02, yanchor="bottom"),
        height=height,
    )
    axes = {name: axis | layout.get(name, {}) for name in ("xaxis", "yaxis")}
    figure = objects.Figure(data=list(data), layout=shared | layout | axes | {"template": None})
    written = json.dumps(figure.to_plotly_json(), ensure_ascii=False).replace("</", "<\\/")
    return (
        f'<figure class="plot" role="img" aria-label="{text(label)}" style="min-height:{height}px"><div></div>'
        f'<script type="application/json">{written}</script></figure>'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, left: int = 1, filtered: bool = False) -> str:
    """A table that sorts by its headers. A cell is what is shown, or a pair of that and the number it sorts by;
    html in a cell is html. The first `left` columns are words."""
    head = "".join(f"<th{'' if i < left else ' class=n'} tabindex=0>{text(name)}</th>" for i, name in enumerate(header))
    body = []
    for row in rows:
        cells = []
        for index, cell in enumerate(row):
            shown, key = cell if isinstance(cell, tuple) else (cell, None)
            sorts = "" if key is None else f' data-v="{key:.6g}"'
            cells.append(f"<td{'' if index < left else ' class=n'}{sorts}>{shown}</td>")
        body.append("<tr>" + "".join(cells) + "</tr>")
    box = '<input type="search" placeholder="filter: softmax backward triton" aria-label="filter the table">' if filtered else ""  # fmt: skip
    return f'<div class="table">{box}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div></div>'  # fmt: skip


def cards(facts: Sequence[tuple[str, str, str]]) -> str:
    """Large figures in a row: (figure, what it is, tone), the tone being a colour's name or empty."""
    if not facts:
        return ""
    return '<div class="cards">' + "".join(
        f'<div class="card"><b{f" class={tone}" if tone else ""}>{text(figure)}</b><span>{text(words)}</span></div>'
        for figure, words, tone in facts
    ) + "</div>"  # fmt: skip


def listed(facts: Sequence[tuple[str, str]]) -> str:
    """Label and value pairs in a row."""
    return "<dl>" + "".join(f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>" for label, value in facts) + "</dl>"  # fmt: skip


def section_html(section: Section, part: Part | None = None) -> str:
    level, anchor = ("h3", f"{part.anchor}-{section.anchor}") if part else ("h2", section.anchor)
    lede = f'<p class="lede">{text(section.lede)}</p>'
    return f'<section id="{anchor}"><{level}>{text(section.title)}</{level}>{lede}{section.body}</section>'


def part_html(part: Part) -> str:
    head = f'<h2>{text(part.title)}</h2><p class="lede">{text(part.lede)}</p>{listed(part.facts)}{part.top}'
    inside = "\n".join(section_html(section, part) for section in part.sections)
    return f'<div class="part" id="{part.anchor}">{head}\n{inside}</div>'


def navigation(content: Sequence[Section | Part]) -> str:
    """Links to every section; a part's stand behind its own."""
    links = []
    for entry in content:
        links.append(f'<a href="#{entry.anchor}">{text(entry.title)}</a>')
        for section in entry.sections if isinstance(entry, Part) else ():
            links.append(f'<a class="within" href="#{entry.anchor}-{section.anchor}">{text(section.title)}</a>')
    return "".join(links)


def refuse_other_file(path: Path) -> None:
    """Refuse to replace what is no such page."""
    if path.is_file() and (there := path.read_bytes()) and MARK not in there:
        raise ValueError(
            f"{path} is there already, and is not a report of tilestack; move it away, or name another file"
        )


def write_page(path: Path, title: str, subtitle: str, facts: Sequence[tuple[str, str]], top: str, sections: Sequence[Section | Part]) -> Path:  # fmt: skip
    """Write the page. `facts` are the label and value pairs under the title, `top` is html before the first section. What is
    there already is replaced where it is such a page, and else refused."""
    refuse_other_file(path)
    variables = [
        "".join(f"--{name}:{pair[dark]};" for name, pair in COLOURS.items()) for dark in (0, 1)
    ]  # fmt: skip
    content = "\n".join(part_html(entry) if isinstance(entry, Part) else section_html(entry) for entry in sections)
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).substitute(
        title=text(title),
        subtitle=text(subtitle),
        facts=listed(facts),
        navigation=navigation(sections),
        light=variables[0],
        dark=variables[1],
        palette=json.dumps(dict(COLOURS.values())),
        top=top,
        content=content,
        plotly=_plotly().offline.get_plotlyjs() if 'class="plot"' in content else "",
    )
    write_text_whole(path, page)
    return path


def _plotly() -> Any:
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError as missing:
        raise MissingExtra(f"the report needs plotly: {install_command('report')}") from missing
    return plotly
