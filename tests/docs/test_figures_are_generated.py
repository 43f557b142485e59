"""No speed is typed by hand: outside generated tables and code, the documentation has no figure with a unit of speed."""

import os
import re

import pytest
from run_page import REPOSITORY

GENERATED = re.compile(r"<!-- (table|cited): .*?<!-- /\1 -->", re.DOTALL)  # from results, or from whom it names
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
UNITS = (
    "[TGM]B/s|[TGM]FLOP/s|TFLOPS|tok/s|(?:tokens|steps|samples|requests)(?:/s| a second| per second)|[µnm]s\\b|(?:micro|milli|nano)seconds?"
    "|× (?:faster|slower|as fast|as long|what|the speed)|times (?:faster|slower|as (?:fast|long)|the speed)"
    "|(?:%|percent) (?:faster|slower|of the roof|of an? \\w+'s (?:memory )?bandwidth)"
    "|微秒|毫秒|倍(?:速|快|慢)|TB 每秒"
)
SPEED = re.compile(rf"\d[\d.,]*\s*(?:{UNITS})")
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+\.(?:png|jpe?g|gif|webp))\)")
DRAWN_FROM_NO_RESULTS = {"tiles.png"}  # which shows where a kernel reads, and no time
PAGES = sorted([*REPOSITORY.glob("README*.md"), *(REPOSITORY / "docs").rglob("*.md")])


def typed_figures(page: str) -> list[str]:
    return SPEED.findall(CODE.sub("", GENERATED.sub("", page)))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_speed_is_typed_by_hand(path):
    assert typed_figures(path.read_text(encoding="utf-8")) == [], "measure it with `make bench` and let a table show it"


def test_no_picture_shows_what_was_measured():
    """Nothing would renew it, nor say that it is old."""
    shown = {
        picture
        for path in PAGES
        for picture in map(os.path.basename, PICTURE.findall(path.read_text(encoding="utf-8")))
    }
    assert shown <= DRAWN_FROM_NO_RESULTS, "draw it in `tilestack report`, or let a table show it"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("It ran at 92,433 tokens/s.", ["92,433 tokens/s"]),
        ("took 627 µs, 1.4 times as long, 12% faster", ["627 µs", "1.4 times as long", "12% faster"]),
        (
            "78% of an H100's memory bandwidth, 1.5× what others have",
            ["78% of an H100's memory bandwidth", "1.5× what"],
        ),
        ("快 2 倍快", ["2 倍快"]),
        ("3.5 TB/s\n<!-- table: headline h200 -->\n| 9 µs |\n<!-- /table -->\n4 GB/s", ["3.5 TB/s", "4 GB/s"]),
        (
            "<!-- cited: https://example.org -->\n| 9 µs |\n<!-- /cited -->\n<!-- cited -->4 GB/s<!-- /cited -->",
            ["4 GB/s"],
        ),
        ("134 / B microseconds at B terabytes per second; heads of 128; `2 µs`", []),
        ("```python\nfloor(4e9)  # 4 GB at 4 TB/s\n```", []),
    ],
)
def test_the_search_finds_speeds_and_nothing_else(page, found):
    assert typed_figures(page) == found
