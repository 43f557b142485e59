"""Results before and after: only what both measured is compared, and a change counts when it exceeds the spread."""

import json
import subprocess

import pytest
from made_up import MACHINE, ROOFS, row

from tilestack.cli import main
from tilestack.lab.bench.compare import Change, compare_results, render_changes, rows_of, summary_of_changes
from tilestack.lab.results import save

BEFORE = {"triton": 100.0, "aten": 80.0, "gluon": 90.0, "cuda": 50.0}
AFTER = {"triton": 120.0, "aten": 79.5, "gluon": 60.0, "liger": 10.0}


def results(times, date, machine=MACHINE):
    rows = [row("softmax", "8192x4096x-1", name, time, date=date) for name, time in times.items()]
    return {"machine": machine, "roofs": ROOFS, "rows": rows}


@pytest.fixture
def folders(tmp_path):
    for name, times in (("before", BEFORE), ("after", AFTER)):
        save(tmp_path / name / "imaginary" / "kernels.json", results(times, name))
    return tmp_path / "before", tmp_path / "after"


def test_what_both_measured_is_judged_by_its_spread(folders):
    changes = compare_results(*(rows_of(str(folder)) for folder in folders))
    found = [(change.after["backend"], change.ratio, change.verdict, change.is_ours) for change in changes]
    assert found == [
        ("triton", 100 / 120, "slower", True),
        ("aten", 80 / 79.5, "equal", False),
        ("gluon", 1.5, "faster", True),
    ]
    ours, peers = summary_of_changes(changes).splitlines()
    assert ours.startswith("ours: 1 faster, 1 slower, 0 equal; geometric mean 1.12×")
    assert peers.startswith("peers: 0 faster, 0 slower, 1 equal")


def test_a_borrowed_kernel_may_become_slower_too_and_the_definition_is_not_ours():
    made = lambda backend, time: row("attention", "8x1024", backend, time)
    found = [Change("", made(backend, 100.0), made(backend, 200.0)) for backend in ("gluon", "torch", "aten")]
    assert [(change.verdict, change.is_ours) for change in found] == [
        ("slower", True), ("slower", False), ("slower", False),
    ]  # fmt: skip


def test_the_same_measurement_is_no_change(folders):
    rows = rows_of(str(folders[0]))
    assert compare_results(rows, rows) == []
    assert summary_of_changes([]) == "nothing of the one was measured again in the other"


def test_another_machine_is_another_measurement(tmp_path):
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    save(here, results(BEFORE, "before"))
    save(there, results(AFTER, "after", MACHINE | {"gpu": "Another GPU"}))
    assert compare_results(rows_of(str(here)), rows_of(str(there))) == []


def test_directions_and_times_of_one_day_are_measurements_of_their_own(tmp_path):
    """Also of rows that were judged by rounds against a peer, which say nothing of before and after."""
    for name, change in (("before", 0.0), ("after", 50.0)):
        rows = [
            row("softmax", "8x4", "triton", 100.0 + change, date="a day", ratio_quartiles=[0.999, 1.001]),
            row("softmax", "8x4", "triton", 300.0 - change, date="a day", direction="backward"),
            row("softmax", "8x4", "aten", 70.0, date="a day"),
        ]
        save(tmp_path / f"{name}.json", {"machine": MACHINE, "roofs": ROOFS, "rows": rows})
    changes = compare_results(*(rows_of(str(tmp_path / f"{name}.json")) for name in ("before", "after")))
    assert [(each.after["direction"], each.ratio, each.verdict) for each in changes] == [
        ("forward", 100 / 150, "slower"), ("backward", 300 / 250, "faster"),
    ]  # fmt: skip


def test_the_largest_changes_either_way_are_shown():
    made = lambda case, time: row("softmax", case, "triton", time)
    changes = compare_results(
        {("", case): made(case, 100.0) for case in "abcd"},
        {("", case): made(case, time) | {"date": "later"} for case, time in zip("abcd", (90.0, 50.0, 110.0, 150.0), strict=True)},
    )  # fmt: skip
    assert [cell.partition(",")[0] for cell in render_changes(changes, most=1).columns[1].cells] == ["d", "b"]


def test_a_git_revision_has_the_results_of_its_time(folders, tmp_path, monkeypatch):
    before, after = folders
    work = tmp_path / "checkout"
    work.mkdir()
    monkeypatch.chdir(work)
    git = lambda *arguments: subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True, capture_output=True)  # fmt: skip
    git("init", "-q")
    before.rename(work / "results")
    git("add", ".")
    git("commit", "-qm", "before")
    for file in (work / "results").rglob("*.json"):
        file.write_text((after / "imaginary" / file.name).read_text())
    assert len(compare_results(rows_of("HEAD"), rows_of("results"))) == 3


def test_the_command_answers_in_json_and_by_its_exit_code(folders, capsys):
    def ran(*asked):
        with pytest.raises(SystemExit) as left:
            main(["compare", *map(str, folders), *asked])
        return left.value.code

    assert ran("--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(each["backend"], each["before_us"], each["after_us"], each["verdict"]) for each in rows] == [
        ("triton", 100.0, 120.0, "slower"), ("aten", 80.0, 79.5, "equal"), ("gluon", 90.0, 60.0, "faster"),
    ]  # fmt: skip
    assert ran("--strict", "--ours") == 1
    said = capsys.readouterr().out
    assert "0.83×" in said
    assert "aten" not in said
    assert ran("-o", "relu") == 1
    assert "nothing named relu was measured both before and after" in capsys.readouterr().err


def test_a_peer_that_became_slower_is_no_fault_of_ours(tmp_path):
    for name, time in (("before", 80.0), ("after", 200.0)):
        save(tmp_path / f"{name}.json", results({"triton": 100.0, "aten": time}, name))
    with pytest.raises(SystemExit) as left:
        main(["compare", str(tmp_path / "before.json"), str(tmp_path / "after.json"), "--strict"])
    assert left.value.code == 0


def test_what_was_timed_before_and_fails_now_is_told_and_no_change_of_speed(folders, capsys):
    failed = results({"triton": 100.0, "aten": 80.0, "gluon": 90.0, "liger": 5.0}, "later")
    for broken in (failed["rows"][0], failed["rows"][1]):
        broken |= {"time_us": None, "note": "out of resource: [shared memory]"}
    failed["rows"].append(row("relu", "8x8", "triton", None, date="later", note="another operator"))
    save(folders[1] / "imaginary" / "kernels.json", failed)
    timed = results(BEFORE, "before")
    timed["rows"].append(row("relu", "8x8", "triton", 5.0, date="before"))
    save(folders[0] / "imaginary" / "kernels.json", timed)

    def ran(*asked):
        with pytest.raises(SystemExit) as left:
            main(["compare", *map(str, folders), "--json", "-", *asked])
        return left.value.code

    assert ran("-o", "softmax") == 0
    out, told = capsys.readouterr()
    assert [row["backend"] for row in json.loads(out)] == ["gluon"]
    assert told.splitlines() == ["fails now: softmax, 8192x4096x-1, bfloat16, forward, triton: out of resource: [shared memory]"]  # fmt: skip
    assert ran("--strict") == 1


def test_the_folder_of_one_machine_is_a_folder_of_results_and_points_of_a_sweep_are_no_rows(folders):
    before, _ = folders
    sweep = {"sweep": "copy", "setting": "4096", "backend": "triton", "time_us": 3.0}
    save(before / "imaginary" / "sweeps" / "memory.json", {"machine": MACHINE, "roofs": ROOFS, "rows": [sweep]})
    assert rows_of(str(before / "imaginary")) == rows_of(str(before))
    with pytest.raises(
        ValueError, match=r"memory.json has no times of operators, layers, optimizers or training steps"
    ):
        rows_of(str(before / "imaginary" / "sweeps" / "memory.json"))


def served(op, case, backend, figure, unit, **others):
    base = dict(op=op, case=case, dtype="bfloat16", direction="forward", backend=backend, figure=figure, unit=unit)
    return base | dict(seconds=1.0, date="a day") | others


def test_figures_of_serving_are_compared_in_their_own_units(tmp_path, capsys):
    """More tokens a second are better, and fewer milliseconds and less work of the processor."""
    before = [
        served("serve", "throughput", "tilestack", 100.0, "tokens/s", model="a"),
        served("serve", "throughput", "vllm", 100.0, "tokens/s", model="a"),
        served("serve", "prefix", "tilestack", 100.0, "tokens/s", model="a"),
        served("serve", "batch 1", "tilestack", 2.0, "ms/step", model="a"),
        served("serve", "first token", "tilestack", 5.0, "ms", model="a"),
        served("http", "a, 64 streams", "http", 1000.0, "tokens/s", cpu_us=20.0),
    ]
    after = [
        before[0] | {"figure": 200.0},
        before[1] | {"figure": 50.0},
        before[2] | {"figure": 300.0, "model": "another"},
        before[3] | {"figure": 1.0},
        before[4] | {"figure": 8.0},
        before[5] | {"figure": 1050.0, "cpu_us": 30.0},
    ]
    for name, rows in (("before", before), ("after", after)):
        save(tmp_path / f"{name}.json", {"machine": MACHINE, "roofs": ROOFS, "rows": rows})
    files = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    changes = compare_results(*map(rows_of, files))
    found = {(each.after["case"], each.after["backend"], each.after["unit"]): each for each in changes}
    assert {key: (each.ratio, each.verdict, each.is_ours) for key, each in found.items()} == {
        ("throughput", "tilestack", "tokens/s"): (2.0, "faster", True),
        ("throughput", "vllm", "tokens/s"): (0.5, "slower", False),
        ("batch 1", "tilestack", "ms/step"): (2.0, "faster", True),
        ("first token", "tilestack", "ms"): (0.625, "slower", True),
        ("a, 64 streams", "http", "tokens/s"): (1.05, "equal", True),
        ("a, 64 streams", "http", "µs of CPU a token"): (20 / 30, "slower", True),
    }
    shown = render_changes(changes, most=5)
    assert {"100 tokens/s", "2.00 ms/step"} < {*shown.columns[2].cells}
    with pytest.raises(SystemExit) as left:
        main(["compare", *files, "-o", "serve", "--strict", "--json", "-"])
    assert left.value.code == 1
    rows = {each["case"]: each for each in json.loads(capsys.readouterr().out) if each["ours"]}
    assert [rows["batch 1"][name] for name in ("before", "after", "unit", "ratio")] == [2.0, 1.0, "ms/step", 2.0]


def test_where_nothing_changed_there_is_no_table(folders):
    rows = rows_of(str(folders[0]))
    assert render_changes(compare_results(rows, rows), most=5) == summary_of_changes([])


@pytest.mark.parametrize("source", ["nowhere", "--upload-pack=x"])
def test_what_is_no_results_is_refused(source):
    with pytest.raises(ValueError, match=r"no git revision here|is no file, folder or git revision"):
        rows_of(source)
