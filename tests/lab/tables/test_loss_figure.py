"""The picture of loss curves: drawn to scale from results, renewed with the tables, and noticed when it is not."""

import json
from xml.etree import ElementTree

import pytest

from tilestack.lab.tables.generated import stale_tables, update_tables
from tilestack.lab.tables.loss_figure import HEIGHT, WIDTH, loss_figure, ticks

SVG = "{http://www.w3.org/2000/svg}"


def kept(*names):
    run = dict(against="bfloat16", reference=[6.0, 5.0, 4.5, 4.0], candidate=[6.0, 5.5, 5.0, 4.5])
    return {"runs": [run | {"name": name} for name in names]}


def points(line):
    return [tuple(float(number) for number in pair.split(",")) for pair in line.get("points").split()]


def test_both_curves_are_drawn_to_one_scale():
    drawn = ElementTree.fromstring(loss_figure(kept("tiny <1>, lr 0.1, 4 steps")))
    reference, candidate = drawn.iter(f"{SVG}polyline")
    # The scale goes from 4 to 6, and a step is a quarter of the width.
    assert points(reference) == [
        (WIDTH / 4, 0), (WIDTH / 2, HEIGHT / 2), (WIDTH * 3 / 4, HEIGHT * 3 / 4), (WIDTH, HEIGHT),
    ]  # fmt: skip
    assert [y for _, y in points(candidate)] == [0, HEIGHT / 4, HEIGHT / 2, HEIGHT * 3 / 4]
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert words[:2] == ["tiny <1>: loss by step", "lr 0.1, 4 steps"]
    assert words[-2:] == ["bfloat16", "fp8"]


def test_there_is_a_panel_for_each_run_two_in_a_row():
    drawn = ElementTree.fromstring(loss_figure(kept("a", "b", "c")))
    places = [group.get("transform") for group in drawn.iter(f"{SVG}g")]
    assert len(set(places)) == 3
    left = [place.split()[0] for place in places]
    assert left[0] == left[2] != left[1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (4.1, 6.9, [4, 5, 6, 7]),
        (0, 300, [0, 100, 200, 300]),
        (0.02, 0.09, [0.02, 0.04, 0.06, 0.08, 0.1]),
        (5.0, 5.0, [5.0, 5.0002, 5.0004, 5.0006, 5.0008, 5.001]),
    ],
)
def test_ticks_are_round_and_reach_around(low, high, expected):
    assert ticks(low, high) == expected


def test_it_is_renewed_with_the_tables(tmp_path):
    results = tmp_path / "results" / "imaginary" / "parity" / "fp8.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps(kept("tiny")))
    picture = tmp_path / "docs" / "figures" / "fp8_loss_imaginary.svg"
    assert stale_tables(tmp_path) == [picture]
    assert update_tables(tmp_path) == [picture]
    assert picture.read_text(encoding="utf-8") == loss_figure(kept("tiny"))
    assert stale_tables(tmp_path) == []
    results.write_text(json.dumps(kept("tiny", "another")))
    assert stale_tables(tmp_path) == [picture]
