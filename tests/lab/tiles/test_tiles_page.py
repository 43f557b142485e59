"""The page of `tilestack tiles`: what is in it, that nothing in it runs but its own script, and that it shows what was done."""

import json
import re

import numpy as np
import pytest
import torch

from tilestack import ops
from tilestack.lab.proof.verify import Claim
from tilestack.lab.proof.workers import load_file
from tilestack.lab.tiles.page import Grid, groups_of, page_data, run_lengths, write_tiles_page
from tilestack.lab.tiles.record import record
from tilestack.lab.tiles.regions import Region
from tilestack.ops import operator_named

CPU = torch.device("cpu")
HOSTILE = "</script><script>window.hostile = true</script><!-- {{data}} -->"
KERNELS = f"""
import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # {HOSTILE}
    inside = place < n
    x = tl.load(x_ptr + place, mask=inside)
    y = tl.load(y_ptr + place, mask=inside)
    tl.store(out_ptr + place, x + y, mask=inside)


@implements(ops.add, backend="mine")
def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 128),)](x, y, out, x.numel(), BLOCK=128)
    raise RuntimeError({HOSTILE!r})
"""


def claim_of(operator, backend, name, direction="forward"):
    operator = operator_named(operator.name)  # which loads the kernels
    case = next(case for case in operator.cases if case.name == name)
    return Claim(operator, operator.implementations[backend], case, "plain", torch.float32, direction, CPU)


@pytest.fixture
def hostile(tmp_path, outside):
    """The page of a user's file, whose comments and errors are HTML."""
    path = tmp_path / "hostile.py"
    path.write_text(KERNELS)
    load_file(path)
    return write_tiles_page(tmp_path / "deep" / "page.html", record(claim_of(ops.add, "mine", "127x3")))


def data_of(page):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


@pytest.mark.parametrize(
    ("elements", "groups"),
    [
        ([], []),
        ([5], [(5, 1, 1, 0)]),
        (range(3, 9), [(3, 6, 1, 0)]),
        ([r * 10 + c for r in range(4) for c in range(3)], [(0, 3, 4, 10)]),  # a tile is one group
        (range(0, 40, 8), [(0, 1, 5, 8)]),
        ([7, 0, 1, 7, 20, 21, 40, 41], [(0, 2, 1, 0), (7, 1, 1, 0), (20, 2, 2, 20)]),
    ],
)
def test_elements_are_written_as_groups_of_runs(elements, groups):
    assert list(groups_of(np.array(elements, int))) == groups


def test_groups_hold_every_element_once_whatever_they_are():
    rng = np.random.default_rng(0)
    for size in (1, 3, 40, 400):
        elements = rng.integers(0, 500, size)
        held = [
            s + r * pitch + i for s, length, n, pitch in groups_of(elements) for r in range(n) for i in range(length)
        ]
        assert sorted(held) == sorted(set(elements.tolist()))


def region_of(*shape):
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return Region("x_ptr", "float32", 4, 1 << 20, shape, tuple(strides))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((), Grid(1, 1, 1, 1)),
        ((40,), Grid(1, 40, 1, 1)),
        ((4100,), Grid(33, 128, 1, 1)),  # a line is wrapped, its last row not full
        ((4100, 1), Grid(33, 128, 1, 1)),
        ((3, 1000), Grid(3, 1000, 1, 4)),
        ((2, 300, 8), Grid(600, 8, 4, 1)),
        ((0, 8), Grid(0, 8, 1, 1)),
    ],
)
def test_tensors_are_drawn_as_rows_and_columns_of_blocks(shape, grid):
    assert Grid.of(region_of(*shape)) == grid


def test_a_cell_has_the_mean_of_its_elements_and_cells_at_the_edges_fewer():
    grid = Grid(rows=3, columns=5, row_block=2, column_block=3)
    counts = np.arange(15)
    assert grid.means(counts).tolist() == [3.5, 6.0, 11.0, 13.5]
    wrapped = Grid(rows=2, columns=4, row_block=2, column_block=2)
    assert wrapped.means(np.array([1, 1, 2, 2, 3])).tolist() == [5 / 3, 2.0]
    assert Grid(0, 8, 1, 1).means(np.zeros(0, int)).size == 0


def test_values_in_a_row_are_written_with_their_number():
    assert run_lengths(np.array([2.0, 2.0, 0.33333, 1.0])) == [2.0, 2, 0.333, 1, 1.0, 1]
    assert run_lengths(np.zeros(0)) == []


def test_the_data_has_every_step_place_and_count():
    data = page_data(record(claim_of(ops.linear, "triton_naive", "70x130x40xplain", "backward")))
    assert [launch["kernel"] for launch in data["launches"]] == ["matmul_naive_kernel"] * 2
    assert {function["name"] for function in data["functions"]} >= {"matmul_naive_kernel", "sum_along_k"}
    for launch in data["launches"]:
        touched = [set() for _ in launch["regions"]]
        for program in launch["programs"]:
            for _, region, place, groups, *_ in program["steps"]:
                function, number = data["places"][place][-1]
                source = data["functions"][function]
                assert re.search(r"tl\.(load|store)", source["lines"][number - source["begins"]])
                for start, length, runs, pitch in zip(*[iter(groups)] * 4, strict=True):
                    touched[region] |= {start + run * pitch + i for run in range(runs) for i in range(length)}
        assert [len(elements) for elements in touched] == [region["size"] for region in launch["regions"]]
    assert json.loads(json.dumps(data)) == data


def test_a_page_escapes_what_comes_from_a_users_file(hostile):
    page = hostile.read_text(encoding="utf-8")
    assert "<script>window.hostile" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r'(?:src|href)="(?!data:)|@import|url\(', page)  # it loads nothing
    data = data_of(page)
    assert HOSTILE in "\n".join(data["functions"][0]["lines"])
    assert HOSTILE in data["error"]


COLOUR = """(() => { const {canvas, region} = cards[%d], at = (x, y) => [...canvas.getContext("2d").getImageData(
    Math.floor((x + 0.4) * canvas.width / region.wide), Math.floor((y + 0.4) * canvas.height / region.high), 1, 1).data].slice(0, 3);
    return at(%d, %d); })()"""


def complaints(page):
    return [each for each in page.complaints if "getImageData" not in each]  # which only these tests call


def said(page, what):
    return page.run(f"document.getElementById('{what}').innerText.replaceAll('\\n', ' ')")


def test_a_hostile_file_stays_text_in_a_browser(hostile, browse):
    page = browse(hostile.as_uri())
    assert page.run("window.hostile === undefined && document.scripts.length === 2")
    assert HOSTILE in said(page, "source")
    assert HOSTILE in said(page, "banners")
    assert complaints(page) == []


def test_a_page_steps_through_programs_by_keyboard(tmp_path, browse):
    recording = record(claim_of(ops.linear, "triton_naive", "70x130x40xplain"))
    page = browse(write_tiles_page(tmp_path / "page.html", recording).as_uri())
    assert page.run("document.title").startswith("linear · triton_naive · forward")
    assert (said(page, "program-said"), said(page, "at-said")) == ("program (0, 0) of 6", "step 1 of 7")
    assert said(page, "step").startswith("load from a_ptr 1,024 lanes · 4,096 bytes")
    blue, untouched = page.run(COLOUR % (0, 0, 0)), page.run(COLOUR % (0, 20, 0))
    assert blue == page.run("ink.blue")
    assert untouched == page.run("ink.cell")
    assert [page.run(COLOUR % (0, 15, row)) for row in (63, 64, 69)] == [blue, untouched, untouched]
    assert "tl.load(a_ptr" in page.run("document.querySelector('.line.current').innerText")
    page.press("ArrowRight")
    assert said(page, "step").startswith("load from b_ptr")
    assert page.run(COLOUR % (0, 0, 0)) not in (blue, untouched)  # loaded before
    page.press("ArrowDown")
    assert (said(page, "program-said"), said(page, "at-said")) == ("program (0, 1) of 6", "step 2 of 7")
    assert page.run(COLOUR % (1, 0, 0)) == untouched
    assert page.run(COLOUR % (1, 64, 0)) == blue
    page.run("seek((taken) => taken[KIND] === 'store')")
    assert page.run(COLOUR % (2, 64, 0)) == page.run("ink.amber")
    assert page.run("[...document.querySelectorAll('#counts tr')].map((row) => row.cells[5].innerText)") == [
        "3.00", "2.00", "1.00",
    ]  # fmt: skip
    assert complaints(page) == []


def test_a_page_shows_which_program_and_how_often(tmp_path, browse):
    written = write_tiles_page(tmp_path / "page.html", record(claim_of(ops.linear, "triton_naive", "70x130x40xplain")))
    page = browse(written.as_uri() + "#programs/0/0/0")
    c = [page.run(COLOUR % (2, *at)) for at in ((0, 1), (63, 1), (65, 1), (1, 65))]
    assert c[0] == c[1]
    assert len({tuple(each) for each in c}) == 3  # a colour for each program
    page.run("setMode('counts')")
    a, b, c = (page.run(COLOUR % (which, 1, 1)) for which in range(3))
    heat = lambda times: page.run(f"heat({times}, 3).map((part) => Math.round(part))")
    assert [a, b, c] == [heat(3), heat(2), heat(1)]
    assert page.run("cellOf({rows: 7, columns: 10, row_block: 2, column_block: 3, wide: 4}, 37)") == 1 * 4 + 2
    assert page.run("saidOf(cards[0].region, 0, 0)") == "a_ptr [0, 0] · read 3× by 3 programs"
    assert page.run("saidOf(cards[2].region, 2, 64)") == "c_ptr [0, 64] · written 1× by program (0, 1)"


def test_a_page_plays_through_and_stops_on_a_phone_too(tmp_path, browse):
    recording = record(claim_of(ops.softmax, "triton", "5x1000x-1"), programs=2)
    page = browse(write_tiles_page(tmp_path / "page.html", recording).as_uri(), width=390, height=844, dark=True)
    assert "the first 2 of 3 programs" in said(page, "banners")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.press(" ")
    page.wait("document.getElementById('program-said').innerText === 'program 1 of 3' && state.step === 1")
    page.wait("state.playing === null")
    assert page.run(COLOUR % (1, 0, 3)) == page.run("ink.amber")
    assert page.run("cards[0].region.column_block") == 4
    assert page.run("share(cards[0].region, [0, 1, 1, 0, 0, 1, 1, 0, 4, 4, 1, 0]).slice(0, 3).join()") == "0.25,1,0"
    assert page.run("saidOf(cards[0].region, 0, 1)") == "x_ptr [0, 4:8] · read 1× by program 0"
    assert complaints(page) == []
