"""The sweeps over access patterns: each moves the same elements, and what is measured is what is shown."""

import json
from dataclasses import replace

import pytest

from tilestack.lab.bench import memory_sweeps
from tilestack.lab.bench.memory_sweeps import SWEEPS, Point, measured_at, sweep_named
from tilestack.lab.results import path_of
from tilestack.lab.stale import present_source
from tilestack.lab.tables.by_name import TableError, table


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_a_sweep_moves_the_same_elements_at_every_setting(sweep):
    results = [sweep.operator.definition(**sweep.arguments(setting, 2**20, "cpu")) for setting in sweep.settings]
    assert {out.numel() for out in results} == {2**20}
    assert len(set(sweep.settings)) == len(sweep.settings)


def test_the_patterns_lie_as_they_say():
    x = sweep_named("row length").arguments(64, 2**12, "cpu")["x"]
    assert (x.shape, x.stride()) == ((64, 64), (128, 1))
    offset = lambda setting: sweep_named("offset").arguments(setting, 2**12, "cpu")["x"].data_ptr() % 16
    assert [offset(setting) for setting in (0, 1, 8)] == [0, 2, 0]
    index = sweep_named("gathered row").arguments(16, 2**12, "cpu")["index"]
    assert sorted(index.tolist()) == list(range(256))
    assert index.tolist() != list(range(256))


def test_a_point_is_measured_on_the_definition_without_a_gpu():
    (point,) = measured_at(sweep_named("stride"), 4, "cpu", elements=2**12)
    assert (point.sweep, point.setting, point.backend, point.how) == ("stride", 4, "torch", "cpu")
    assert point.time_us is not None
    assert point.tb_per_s == pytest.approx(2 * 2**12 * 2 / point.time_us * 1e-6)


POINT = Point("stride", 1, "triton", 100.0, 0.01, 3.0, "graph", "", present_source("strided_copy", "triton"))
MACHINE = dict(gpu="Imaginary GPU 9000", slug="imaginary", cpu="", torch="2.99.0", triton="3.99.1", commit="abc1234", date="2031-05-06T07:08:09Z")  # fmt: skip


@pytest.fixture
def run():
    """Made-up sweeps; nothing here was measured."""
    points = [
        POINT,
        replace(POINT, backend="aten", tb_per_s=2.0),
        replace(POINT, setting=64, tb_per_s=0.25),
        replace(POINT, setting=64, backend="aten", time_us=None, spread=None, tb_per_s=None, note="out of memory"),
    ]
    rows = [vars(point) for point in points]
    return dict(machine=MACHINE, roofs={"copy_tb_per_s": 4.0}, rows=rows)


def test_the_table_of_a_sweep(run, tmp_path):
    path = path_of("imaginary", memory_sweeps.RESULTS, tmp_path / "results")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(run))
    written = table("memory imaginary stride", tmp_path)
    assert written.splitlines()[2:4] == ["| 1 | 3,000 GB/s | 2,000 GB/s | 75% |", "| 64 | 250 GB/s | – | 6% |"]
    assert written.endswith("commit abc1234, 2031-05-06, kernel time by CUDA-graph replay with cold caches._")
    path.write_text(json.dumps(run | {"rows": [row | {"source": "another"} for row in run["rows"]]}))
    assert table("memory imaginary stride", tmp_path).endswith("at commit abc1234._")
    assert table("memory imaginary offset", tmp_path).startswith("_not measured yet: `tilestack bench memory`")
    assert table("memory h100 gathered row", tmp_path).startswith("_not measured yet")
    with pytest.raises(TableError, match="memory GPU SWEEP"):
        table("memory imaginary strides", tmp_path)


def test_sweeps_are_no_contests(run, tmp_path):
    from tilestack.lab.contests import results_under

    path = path_of("imaginary", memory_sweeps.RESULTS, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(run))
    assert results_under(tmp_path) == []


def test_the_section_draws_what_there_is_and_says_what_there_is_not(run):
    section = memory_sweeps.sweeps_section(run)
    assert section.body.count("<h3>") == len(SWEEPS)
    assert section.body.count('class="plot"') == 1
    assert section.body.count("tilestack bench memory") == len(SWEEPS) - 1
    assert "copy roof, 4,000 GB/s" in section.body
    assert "CPU" not in section.lede
    assert "CPU" in memory_sweeps.sweeps_section(run | dict(machine=MACHINE | dict(gpu=""), roofs={})).lede


def test_the_terminal_shows_failures(run):
    stride, *_ = memory_sweeps.sweep_tables(memory_sweeps.points_of(run))
    cells = list(stride.columns[2].cells)
    assert (cells[0], cells[-1]) == ("2,000 GB/s", "out of memory")
