"""The report shows what it was given: the numbers, the losses, the failures, and what to run when there is nothing."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import MACHINE, contest, large_result, many_proofs, proof, row, small_result

from tilestack.extras import MissingExtra
from tilestack.lab.report.page import COLOURS, Section, colour, plot, table
from tilestack.lab.report.plots import kernel_families
from tilestack.lab.report.write import share_of_bound, write_report

CPU = {"cpu": "Imaginary CPU, 2 cores", "gpu": "", "slug": "cpu", "torch": "2.99.0", "date": "2031-05-06T07:08:09Z"}


def words(page: str) -> str:
    """The page without the inlined library."""
    return re.sub(r"<script>/\*\*\n\* plotly.*?</script>", "", page, flags=re.DOTALL)


def written(tmp_path: Path, *arguments, **others) -> str:
    return words(write_report(tmp_path / "deep" / "report.html", *arguments, **others).read_text(encoding="utf-8"))


def plots(page: str) -> dict[str, dict]:
    found = re.findall(
        r'aria-label="([^"]*)"[^>]*><div></div><script type="application/json">(.*?)</script>', page, re.S
    )
    return {label: json.loads(source) for label, source in found}


def section(page: str, anchor: str) -> str:
    return re.search(rf'<section id="{anchor}">(.*?)</section>', page, re.S)[1]


def part(page: str, anchor: str) -> str:
    """All that stands under the name of one machine."""
    return re.search(rf'<div class="part" id="{anchor}">(.*?)(?=<div class="part"|<footer>)', page, re.S)[1]


def table_rows(html: str) -> list[list[str]]:
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)]
        for line in re.findall(r"<tr>(<td.*?)</tr>", html)
    ]


def headings(page: str) -> list[str]:
    head = re.search(r"<thead>.*?</thead>", section(page, "this-machine-every-measurement"))[0]
    return re.findall(r"<th [^>]*>(.*?)</th>", head)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    proofs = [proof("add"), proof("softmax", error=0.008), proof("softmax", ok=False, error=0.5, message="out: <tail> unwritten")]  # fmt: skip
    return written(tmp_path_factory.mktemp("report"), [small_result()], proofs, MACHINE)


def test_header_names_the_machine(page):
    for value in ("Imaginary GPU 9000", "999.1", "2.99.0", "3.99.1", "abc1234", "2031-05-06 07:08"):
        assert f"<dd>{value}</dd>" in page


def test_every_row_is_in_the_table_with_its_numbers(page):
    rows = table_rows(section(page, "this-machine-every-measurement"))
    assert len(rows) == len(small_result().rows)
    ours = next(row for row in rows if row[:3] == ["softmax forward", "8192×4096, dim -1 bfloat16", "triton"])
    assert ours[3:10] == ["80.0 µs", "1.0%", "9.5 µs", "3.36", "6.25", "84%", "1.25×"]
    failed = next(row for row in rows if row[2] == "liger")
    assert failed[3:] == ["–"] * 8 + ["ran out of &lt;memory&gt;"]


def test_columns_that_no_row_fills_are_left_out(page, tmp_path):
    assert headings(page)[3:6] == ["time", "spread", "host"]
    assert headings(page)[-1] == "note"
    rows = [row | {"how": "cpu", "note": "", "peak_mib": None} for row in small_result().rows if row["time_us"]]
    on_a_cpu = written(tmp_path, [replace(small_result(), rows=rows, machine=CPU)], [], CPU)
    assert headings(on_a_cpu) == ["operator", "case", "backend", "time", "spread", "GB/s", "GFLOP/s", "of roof", "× best peer"]  # fmt: skip


def test_a_loss_is_as_visible_as_a_win(page):
    figure = plots(page)["Against the fastest peer"]
    bars, points = figure["data"]
    ends = dict(zip(bars["y"], (bars["base"] + length for length in bars["x"]), strict=True))
    assert list(ends) == ["linear forward", "softmax forward"]  # sorted, the best on top
    assert ends["linear forward"] == pytest.approx(220 / 400)
    assert ends["softmax forward"] == pytest.approx(((100 / 80) * (24 / 32)) ** 0.5)
    assert dict(zip(points["x"], points["marker"]["color"], strict=True)) == {
        220 / 400: colour("bad"),
        24 / 32: colour("bad"),
        100 / 80: colour("good"),
    }
    low, high = figure["layout"]["xaxis"]["range"]
    assert low == -high  # twice as slow lies as far from 1 as twice as fast
    assert '<b class="bad">0.55×</b>' in page
    assert "1 of 3</b><span>cases won, 2 lost" in page


def test_roofline_places_rows_under_their_roofs(page):
    figure = plots(page)["roofline"]
    slope, *ceilings = [trace for trace in figure["data"] if trace["mode"] == "lines"]
    assert slope["y"][0] / slope["x"][0] == pytest.approx(4.0)
    assert sorted(trace["y"][0] for trace in ceilings) == [50.0, 690.0, 700.0]
    points = {trace["name"]: trace for trace in figure["data"] if trace["mode"] == "markers"}
    assert set(points) == {"matmul", "softmax"}  # as their kernels are filed
    assert points["matmul"]["x"] == [pytest.approx(137_438_953_472 / 100_663_296)]
    assert points["matmul"]["y"] == [pytest.approx(137_438_953_472 / 400 * 1e-6)]
    assert "400 µs, 344 TFLOP/s, 49% of the roof" in points["matmul"]["hovertext"][0]
    assert points["softmax"]["marker"]["symbol"].count("square-open") == 1


def test_rows_without_arithmetic_are_counted_not_dropped_silently(tmp_path):
    page = written(tmp_path, [large_result()], [], MACHINE)
    assert "4 measurements do no arithmetic" in section(page, "this-machine-roofline")


def test_roof_bars_show_our_part_of_the_roof(page):
    bars, points = plots(page)["How close to the roof"]["data"]
    assert points["x"][bars["y"].index("softmax backward")] > 0
    assert max(points["x"]) == pytest.approx(402_653_184 / 4 * 1e-6 / 110)


def test_host_times_are_plotted_per_backend(page):
    traces = {trace["name"]: trace for trace in plots(page)["host against kernel time"]["data"]}
    assert sorted(traces["triton"]["x"]) == [32, 80, 110, 400]
    assert traces["least of a PyTorch call, 3.0 µs"]["y"] == [3.0, 3.0]


def test_failures_come_first_and_with_their_message(page):
    proofs = section(page, "this-machine-proofs")
    assert "1 of 3 proofs fail" in proofs
    assert "out: &lt;tail&gt; unwritten" in proofs
    rows = table_rows(proofs)
    assert rows[0] == ["softmax", "triton", "float32", "forward", "1 of 2 fail", "2", "5000%"]
    assert rows[1] == ["add", "triton", "float32", "forward", "holds", "1", "40%"]


@pytest.mark.parametrize(
    ("error", "bound", "share"),
    [(0.5, 1.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (float("nan"), 1.0, float("inf")), (None, None, 0.0)],
)
def test_share_of_the_bound(error, bound, share):
    assert share_of_bound(proof("add", error=error, bound=bound)) == share


def test_a_proof_without_a_bound_claims_no_share_of_it(tmp_path):
    page = written(tmp_path, [], [proof("add", direction="gradcheck", error=0.0, bound=0.0)], MACHINE)
    assert table_rows(section(page, "this-machine-proofs"))[0][-1] == "–"


def test_untried_claims_are_counted(tmp_path):
    page = written(tmp_path, [], [*many_proofs(), proof("add", ok=None)], MACHINE)
    assert "takes: 1." in section(page, "this-machine-proofs")
    assert "<b class=good>180</b><span>proofs, none fails" in page


def test_proofs_that_were_kept_of_this_machine_stand_under_it_without_measurements(tmp_path):
    kept = {
        "cpu": Section("Proved on cpu", "3 of 52 backends are proved.", "the table"),
        "other": Section("No", "", ""),
    }
    page = written(tmp_path, [], [], CPU, kept_proofs=kept)
    assert "3 of 52 backends" in section(page, "this-machine-proved-on-cpu")
    assert "this-machine-proofs" not in page
    assert "No proofs here" not in page


def test_nothing_is_fetched_from_the_network(tmp_path):
    whole = write_report(tmp_path / "report.html", [small_result()], many_proofs(), MACHINE).read_text(encoding="utf-8")
    assert whole.count("* plotly.js v") == 1  # inlined, once
    assert not re.search(r'src="(https?:)?//', whole)
    assert not re.search(r"https?://|@import|url\(", words(whole))


def test_empty_states_name_the_command(tmp_path):
    page = written(tmp_path, [], [], {"cpu": "Imaginary CPU"})
    assert "<code>tilestack verify --save</code>" in section(page, "this-machine-proofs")
    assert "<code>tilestack bench --save</code>" in section(page, "on-a-gpu")
    assert "plotly" not in page


def test_cpu_results_do_not_pretend_to_be_kernels(tmp_path):
    result = small_result()
    rows = [row | {"how": "cpu"} for row in result.rows if row["backend"] == "aten"]
    page = written(tmp_path, [replace(result, machine=CPU, rows=rows)], [], CPU)
    assert set(re.findall(r'<section id="([^"]*)"', page)) == {
        "this-machine-proofs",
        "this-machine-roofline",
        "this-machine-every-measurement",
        "on-a-gpu",
    }


def test_saved_figures_stand_under_the_machine_that_made_them(tmp_path):
    page = written(tmp_path, [small_result()], [proof("add")], CPU)
    here, there = part(page, "this-machine"), part(page, "on-imaginary-gpu-9000")
    assert "<dt>CPU</dt><dd>Imaginary CPU, 2 cores</dd>" in here
    assert "Imaginary GPU" not in here
    assert "1</b><span>proofs, none fails" in here
    assert "<dt>GPU</dt><dd>Imaginary GPU 9000</dd>" in there
    assert "Imaginary CPU" not in there
    assert "1 of 3</b><span>cases won, 2 lost" in there
    assert len(table_rows(section(page, "on-imaginary-gpu-9000-every-measurement"))) == len(small_result().rows)
    assert "<dt>with saved figures of</dt><dd>Imaginary GPU 9000</dd>" in page


def test_results_of_two_machines_are_kept_apart(tmp_path):
    other = replace(small_result(), machine=MACHINE | {"slug": "other", "gpu": "Another GPU"})
    page = written(tmp_path, [small_result(), other], [], MACHINE)
    for anchor in ("this-machine", "on-another-gpu"):
        assert len(table_rows(section(page, f"{anchor}-every-measurement"))) == len(small_result().rows)
    assert "<dd>Another GPU</dd>" in part(page, "on-another-gpu")
    assert "Another GPU" not in part(page, "this-machine")


def test_another_processor_of_no_gpu_is_another_machine(tmp_path):
    saved = replace(small_result(), machine=CPU | {"cpu": "Somebody's CPU, 64 cores"})
    page = written(tmp_path, [saved], [], CPU)
    assert "Somebody&#x27;s CPU, 64 cores" in page
    assert not re.search(r'id="this-machine-every-measurement"', page)


def test_every_commit_and_the_dates_of_saved_rows_are_told(tmp_path):
    result = small_result()
    told = [row | {"commit": commit, "date": date} for row, commit, date in zip(result.rows, "ab" * 9, ["2031-05-01", "2031-05-04"] * 9, strict=False)]  # fmt: skip
    there = part(written(tmp_path, [replace(result, rows=told)], [], CPU), "on-imaginary-gpu-9000")
    assert "<dt>commit</dt><dd>a, b</dd>" in there
    assert "<dd>2031-05-01 to 2031-05-04</dd>" in there


def test_a_processor_counts_in_thousands_less(tmp_path):
    page = written(tmp_path, [replace(small_result(), machine=CPU)], [], CPU)
    ours = next(row for row in table_rows(section(page, "this-machine-every-measurement")) if row[:2] == ["softmax forward", "8192×4096, dim -1 bfloat16"])  # fmt: skip
    assert ours[6:8] == ["3,355", "6,250"]
    assert headings(page)[6:8] == ["GB/s", "GFLOP/s"]
    assert plots(page)["roofline"]["layout"]["yaxis"]["title"]["text"] == "GFLOP/s"


def test_every_family_has_a_colour_and_a_mark_of_its_own(tmp_path):
    traces = [t for t in plots(written(tmp_path, [large_result()], [], MACHINE))["roofline"]["data"] if t["mode"] == "markers"]  # fmt: skip
    looks = {(trace["marker"]["color"], trace["marker"]["symbol"][0].removesuffix("-open")) for trace in traces}
    assert len(looks) == len(traces) > 3
    assert len({shade for shade, _ in looks}) == len({mark for _, mark in looks}) == len(traces)


def test_bars_leave_no_empty_bands(page):
    figure = plots(page)["Against the fastest peer"]
    assert figure["layout"]["yaxis"]["range"] == [-0.6, len(figure["data"][0]["y"]) - 0.4]


def test_more_than_the_roof_is_explained_where_it_occurs(page, tmp_path):
    assert "above 100%" not in section(page, "this-machine-how-close-to-the-roof")
    fast = replace(small_result(), rows=[row | {"roof_fraction": 1.3} for row in small_result().rows if row["time_us"]])
    told = section(written(tmp_path, [fast], [], MACHINE), "this-machine-how-close-to-the-roof")
    assert "4 of 4 lie above 100%" in told


def test_of_two_runs_of_a_contest_the_later_counts(tmp_path):
    later = replace(
        small_result(),
        machine=MACHINE | {"date": "2032-01-01"},
        rows=[row | {"time_us": 77.0} for row in small_result().rows if row["op"] == "linear"],
    )
    rows = table_rows(
        section(written(tmp_path, [later, small_result()], [], MACHINE), "this-machine-every-measurement")
    )
    assert {row[3] for row in rows if row[0] == "linear forward"} == {"77.0 µs"}
    assert len(rows) == len(small_result().rows)


def test_sections_of_other_parts_are_added(tmp_path):
    figure = plot([dict(type="scatter", x=[1, 2], y=[3, 2])], {}, 300, "loss")
    page = written(tmp_path, [], [], MACHINE, sections=[Section("Training loss", "It falls.", figure)])
    assert '<a class="within" href="#this-machine-training-loss">Training loss</a>' in page
    assert plots(page)["loss"]["data"][0]["y"] == [3, 2]


def test_a_plot_rejects_what_plotly_does_not_know():
    with pytest.raises(ValueError, match="mistake"):
        plot([dict(type="scatter", mistake=1)], {}, 300, "wrong")


def test_text_cannot_break_out_of_a_plot():
    assert "</script><script>" not in plot([dict(type="scatter", name="</script><script>")], {}, 300, "quoted")


def test_a_cell_sorts_by_its_number():
    assert '<td class=n data-v="1500">1.5 ms</td>' in table(["name", "time"], [["a", ("1.5 ms", 1500)]])


def test_colours_have_distinct_names_for_the_dark():
    lights = [light for light, _ in COLOURS.values()]
    assert len(set(lights)) == len(lights)  # the page maps a light colour to its dark one
    assert not set(lights) & {dark for _, dark in COLOURS.values()}


def test_without_plotly_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"^the report needs plotly: pip install -e '.*\[report\]'$"):
        write_report(tmp_path / "report.html", [small_result()], [], MACHINE)


def test_what_was_measured_on_an_older_source_says_so_and_a_draw_is_no_win(tmp_path):
    rows = contest("softmax", "8192x4096x-1", 100.0, {"aten": 103.0}, spread=0.05)
    rows = [row | {"source": "another", "commit": "0ld0000"} for row in rows]
    page = written(tmp_path, [replace(small_result(), rows=rows)], [], MACHINE)
    ours = next(row for row in table_rows(section(page, "this-machine-every-measurement")) if row[2] == "triton")
    assert (ours[9], ours[-1]) == ("1.03× equal", "older source, 0ld0000")
    assert "0 of 1</b><span>cases won, 0 lost, 1 equal" in page


def test_a_slower_backend_of_ours_says_so_too(tmp_path):
    rungs = [row("linear", "8x8x8xplain", "gluon", 50.0), row("linear", "8x8x8xplain", "triton", 90.0, source="another", commit="0ld0000")]  # fmt: skip
    page = written(tmp_path, [replace(small_result(), rows=rungs)], [], MACHINE)
    notes = {row[2]: row[-1] for row in table_rows(section(page, "this-machine-every-measurement"))}
    assert notes == {"gluon": "–", "triton": "older source, 0ld0000"}


def test_proofs_kept_of_a_gpu_stand_under_its_name(tmp_path):
    kept = {"imaginary": Section("Proved on imaginary", "1 of 2.", "<p>kept</p>")}
    assert "kept" in section(
        written(tmp_path, [small_result()], [], MACHINE, kept_proofs=kept), "this-machine-proved-on-imaginary"
    )


def test_an_operator_is_of_the_family_of_its_triton_kernels():
    families = kernel_families()
    assert (families["add"], families["softmax"], families["linear"]) == ("elementwise", "softmax", "matmul")
    assert not {"cuda", "hopper"} & set(families.values())


def test_a_report_takes_the_place_of_a_report_and_of_no_other_file(tmp_path):
    page = tmp_path / "index.html"
    for _ in range(2):
        write_report(page, [], [], MACHINE)
    page.write_text("my own page")
    with pytest.raises(ValueError, match=r"index\.html is there already, and is not a report of tilestack"):
        write_report(page, [], [], MACHINE)
    assert page.read_text() == "my own page"
