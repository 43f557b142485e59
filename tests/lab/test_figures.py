"""The committed figures are what the code draws, and what they show is what there is."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import MACHINE, small_result

from tilestack.lab.drawing import INK, ROLES, SHAPES, Drawing
from tilestack.lab.figures import WALL, figures, roofline, stale_figures, the_stack, update_figures

REPOSITORY = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_committed_figures_are_fresh():
    assert stale_figures(REPOSITORY) == [], "run `make docs` and commit what it changes"


def test_figures_are_written_once_and_staleness_is_seen(tmp_path):
    changed = update_figures(tmp_path)
    assert {path.name for path in changed} == set(figures(tmp_path))
    assert update_figures(tmp_path) == []
    changed[0].write_text("edited by hand")
    changed[1].unlink()
    assert stale_figures(tmp_path) == changed[:2]


@pytest.mark.parametrize("name", sorted(figures(REPOSITORY)))
def test_a_figure_is_a_card_with_words_inside(name):
    drawn = ElementTree.fromstring(figures(REPOSITORY)[name])
    width, height = (float(drawn.get(side)) for side in ("width", "height"))
    assert drawn.find(f"{SVG}title").text
    assert drawn.find(f"{SVG}desc").text
    assert "prefers-color-scheme:dark" in drawn.find(f"{SVG}style").text
    known = {*SHAPES, *ROLES, *(f"{prefix}-{ink}" for ink in INK for prefix in "tlh")}
    ids = {marker.get("id") for marker in drawn.iter(f"{SVG}marker")}
    for element in drawn.iter():
        assert set((element.get("class") or "").split()) <= known
        assert element.get("marker-end") is None or element.get("marker-end")[5:-1] in ids
    for rect in drawn.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    for text in drawn.iter(f"{SVG}text"):
        reach = 7.2 * len(text.text)  # wider than any of the fonts sets a letter
        x, anchor = float(text.get("x")), text.get("text-anchor")
        if text.get("transform") is None:
            left = {"start": x, "middle": x - reach / 2, "end": x - reach}[anchor]
            assert 0 <= left < left + reach <= width + 40, text.text


def test_roofline_shows_measured_roofs_or_no_numbers():
    with_numbers = roofline([small_result()]).svg()
    for words in (
        "Roofs measured on Imaginary GPU 9000",
        "4.00 TB/s",
        "bfloat16 700, float16 690 TFLOP/s",
        "175 flops",
    ):
        assert words in with_numbers
    on_cpu = replace(small_result(), machine=MACHINE | {"slug": "cpu"})
    for results in ([], [on_cpu]):
        schematic = roofline(results).svg()
        assert "TB/s" not in schematic
        assert "TFLOP/s (log)" in schematic
        assert "700" not in ElementTree.tostring(ElementTree.fromstring(schematic), method="text", encoding="unicode").replace(STYLE, "")  # fmt: skip


STYLE = ElementTree.fromstring(Drawing(1, 1, "", "").svg()).find(f"{SVG}style").text


def test_the_stack_outlines_what_is_not_there(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").touch()
    drawn = ElementTree.fromstring(the_stack(tmp_path).svg())
    outlined = sum(rect.get("class") == "masked" for rect in drawn.iter(f"{SVG}rect"))
    assert outlined == sum(len(bricks) for bricks in WALL) - 1


def test_the_stack_has_every_package():
    bricks = {name for level in WALL for name, _, _ in level}
    packages = {path.parent.name for path in (REPOSITORY / "tilestack").glob("*/__init__.py")}
    assert packages <= bricks


def test_text_is_escaped():
    draw = Drawing(100, 50, "a < b", "c & d")
    draw.text(50, 25, "x < y & z")
    root = ElementTree.fromstring(draw.svg())
    assert root.find(f"{SVG}text").text == "x < y & z"
    assert root.find(f"{SVG}title").text == "a < b"
