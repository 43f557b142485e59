"""The figures of the documentation: drawings that carry their words and their dark colours, and no measured number."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FIGURES = sorted((REPOSITORY / "docs" / "figures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def drawn(name: str) -> ElementTree.Element:
    return ElementTree.parse(REPOSITORY / "docs" / "figures" / name).getroot()


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_described_and_readable_in_the_dark(path):
    figure = ElementTree.parse(path).getroot()
    assert figure.find(f"{SVG}title").text
    assert figure.find(f"{SVG}desc").text
    assert "prefers-color-scheme:dark" in figure.find(f"{SVG}style").text


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_drawing_shows_no_measured_figure(path):
    words = " ".join(text.text for text in ElementTree.parse(path).getroot().iter(f"{SVG}text"))
    assert not re.search(r"\d\s*(TFLOP/s|TB/s|GB/s|µs|ms|×)", words)


def test_every_figure_is_shown_somewhere():
    pages = "".join(page.read_text() for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
    assert [path.name for path in FIGURES if path.name not in pages] == []


def test_the_stack_has_every_package():
    named = {text.text for text in drawn("the_stack.svg").iter(f"{SVG}text") if text.get("class").startswith("code ")}
    assert named == {path.parent.name for path in (REPOSITORY / "tilestack").glob("*/__init__.py")}
