"""Drawing tiles: a small SVG canvas with one look for every figure of the documentation.

A shape has a kind (`a`, `b`, `c`, `d` are programs or operands, `masked`, `plain`, `good`, `bad`), a text has a role
(`title`, `body`, `small`, `code`); what they look like is decided once, in STYLE, for light and for dark readers.
Colours are plain rules and not CSS variables, because SVG renderers outside browsers do not know variables.
"""

from collections.abc import Callable
from html import escape
from typing import Any

SANS = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# kind: (fill, stroke) for light readers, then for dark ones
SHAPES = {
    "card": ("#fbfbfd", "#e3e5ec", "#14161c", "#2a2e3a"),
    "plain": ("#eef0f5", "#c3c8d4", "#20242e", "#3d4454"),
    "a": ("#cfe0fd", "#3f74d9", "#1d3564", "#6f9df0"),
    "b": ("#c9efe3", "#1f9673", "#123f35", "#4cc3a0"),
    "c": ("#fde3bd", "#cf8213", "#4d3513", "#eaa944"),
    "d": ("#e3d9fb", "#7d5bd0", "#352a5c", "#ab90f0"),
    "good": ("#d8f3dc", "#2f9e52", "#173d25", "#57c97b"),
    "bad": ("#fbdad7", "#d0453a", "#4d1f1d", "#f07a70"),
    "masked": ("none", "#9aa1b1", "none", "#6d7589"),
    "area": ("#3f74d9", "none", "#6f9df0", "none"),
}
INK = {"ink": ("#1d2330", "#e9ebf1"), "muted": ("#626a7c", "#9ba3b5")} | {
    kind: (light, dark) for kind, (_, light, _, dark) in SHAPES.items() if kind in "abcd" or kind in ("good", "bad")
}
ROLES = {
    "title": f"font:600 16px {SANS}",
    "body": f"font:500 13px {SANS}",
    "small": f"font:400 11.5px {SANS}",
    "code": f"font:500 12px {MONO}",
}


def _rules(dark: bool) -> str:
    shapes = [f".{kind}{{fill:{c[2 * dark]};stroke:{c[2 * dark + 1]}}}" for kind, c in SHAPES.items()]
    words = [f".t-{ink}{{fill:{c[dark]}}}.l-{ink}{{stroke:{c[dark]};fill:none}}" for ink, c in INK.items()]
    heads = [f".h-{ink}{{fill:{c[dark]}}}" for ink, c in INK.items()]
    return "".join(shapes + words + heads)


STYLE = (
    "".join(f".{role}{{{font}}}" for role, font in ROLES.items())
    + ".masked{stroke-dasharray:3 3}.area{fill-opacity:.08}"
    + _rules(dark=False)
    + f"@media (prefers-color-scheme:dark){{{_rules(dark=True)}}}"
)


def number(value: float) -> str:
    """A coordinate with at most two decimals, so that the files are small and the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """A card of fixed size, described for readers who cannot see it; `svg()` is the file."""

    def __init__(self, width: float, height: float, title: str, description: str):
        self.width, self.height, self.title, self.description = width, height, title, description
        self.parts: list[str] = []
        self.heads: set[str] = set()
        self.rect(0.5, 0.5, width - 1, height - 1, "card", radius=10)

    def add(self, element: str, content: str | None = None, **attributes: Any) -> None:
        written = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{number(v) if isinstance(v, int | float) else escape(str(v))}"'
            for name, v in attributes.items()
        )
        self.parts.append(f"<{element}{written}/>" if content is None else f"<{element}{written}>{content}</{element}>")

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, rx=radius, class_=kind)

    def text(
        self, x: float, y: float, words: str, role: str = "body", ink: str = "ink", anchor: str = "middle",
        turned: bool = False,
    ) -> None:  # fmt: skip
        """Words on one line; y is where their middle lies."""
        turn = dict(transform=f"rotate(-90 {number(x)} {number(y)})") if turned else {}
        self.add(
            "text", escape(words, quote=False), x=x, y=y, class_=f"{role} t-{ink}", text_anchor=anchor, dy=".35em", **turn
        )  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str, role: str = "body") -> None:
        """A rectangle with centred lines of text: the first in ink, the others small and muted."""
        self.rect(x, y, width, height, kind, radius=6)
        top = y + height / 2 - 8.5 * (len(lines) - 1)
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * index, line, role if index == 0 else "small", "ink" if index == 0 else "muted")  # fmt: skip

    def grid(
        self, x: float, y: float, rows: int, columns: int, width: float, height: float, kind: Callable[[int, int], str]
    ) -> None:
        """Cells of one size side by side; `kind(row, column)` says what each is."""
        for row in range(rows):
            for column in range(columns):
                self.rect(x + column * width, y + row * height, width - 2, height - 2, kind(row, column), radius=2.5)

    def line(self, *points: tuple[float, float], ink: str = "muted", head: bool = False, dashed: bool = False, width: float = 1.5) -> None:  # fmt: skip
        path = "M" + " L".join(f"{number(x)} {number(y)}" for x, y in points)
        more: dict[str, Any] = dict(marker_end=f"url(#head-{ink})") if head else {}
        if head:
            self.heads.add(ink)
        if dashed:
            more["stroke_dasharray"] = "4 4"
        self.add("path", d=path, class_=f"l-{ink}", stroke_width=width, **more)

    def arrow(self, *points: tuple[float, float], ink: str = "muted") -> None:
        self.line(*points, ink=ink, head=True)

    def bracket(self, left: float, right: float, y: float, label: str, ink: str = "muted", below: bool = False) -> None:
        """A flat bracket over (or under) a stretch, with its name."""
        tip = -6 if below else 6
        self.line((left, y + tip), (left, y), (right, y), (right, y + tip), ink=ink, width=1.25)
        self.text((left + right) / 2, y - 2 * tip, label, "small", ink)

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="head-{ink}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0.5 L7.5 4 L0 7.5 z" class="h-{ink}"/></marker>'
            for ink in sorted(self.heads)
        )
        size = f"{number(self.width)} {number(self.height)}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{number(self.width)}" '
            f'height="{number(self.height)}" role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self.title)}</title>\n<desc id="description">{escape(self.description)}</desc>\n'
            f"<style>{STYLE}</style>\n<defs>{heads}</defs>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )
