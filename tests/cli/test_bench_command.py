"""`tilestack bench`: every part of `all`, only what is stale, and no more than the budget."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.main import get_command

from tilestack.cli import app, main
from tilestack.cli.bench import Asked, bench_kernels
from tilestack.lab import results
from tilestack.lab.bench import host_time, memory_sweeps, operators, optimizer_steps, quantised_models
from tilestack.lab.rows import Row
from tilestack.lab.serving import bench_http, bench_serve
from tilestack.lab.stale import present_source
from tilestack.lab.training import bench_layers, bench_train
from tilestack.tuning import preferences

HOST_ROWS = [
    dict(op="relu", case="64", dtype="bfloat16", direction="no_grad", backend="triton", host_us=9.0, floor_us=7.0)
]


@pytest.fixture
def parts(monkeypatch, tmp_path, outside):
    """What each part was asked to do, instead of doing it; results go to a folder of the test's own."""
    asked = []
    monkeypatch.chdir(tmp_path)

    def kernels(operators, *_, **__):
        asked.append(("kernels", len(operators) > 1))
        return []

    monkeypatch.setattr(operators, "bench_operators", kernels)
    monkeypatch.setattr(memory_sweeps, "bench_memory", lambda *_: asked.append(("memory", True)) or {"rows": [], "machine": {"gpu": "", "cpu": "", "date": ""}, "roofs": {}})  # fmt: skip

    monkeypatch.setattr(host_time, "bench_host", lambda device, *_: asked.append(("host", device)) or [HOST_ROWS])

    def optimizers(*_, kept, **__):
        asked.append(("optim", len(kept)))
        yield []

    monkeypatch.setattr(optimizer_steps, "bench_optim", optimizers)
    monkeypatch.setattr(
        bench_layers, "bench_layers", lambda works, *_: asked.append(("layers", len(works))) or iter(())
    )
    monkeypatch.setattr(bench_train, "bench_train", lambda work, *_: asked.append(("train", work.case)) or [])
    monkeypatch.setattr(bench_serve, "bench_serve", lambda device, *_: asked.append(("serve", device)) or [])
    monkeypatch.setattr(bench_http, "bench_http", lambda device, *_, **__: asked.append(("http", device)) or ([], {}))
    return asked


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments, "--device", "cpu"])
    return ended.value.code


def test_all_is_every_part(parts):
    assert run("all") == 0
    served = [("serve", "cpu"), ("http", "cpu")]
    assert parts == [("kernels", True), ("memory", True), ("host", "cpu"), ("optim", 0), ("layers", 1), ("train", "python, 4x256"), *served]  # fmt: skip


def test_the_quality_of_quantised_weights_is_measured_by_itself(parts, monkeypatch):
    asked = []
    monkeypatch.setattr(quantised_models, "measure_quality", lambda chosen, *_: iter(asked.append(len(chosen)) or ()))
    assert run("quantize") == 0
    assert asked == [len(quantised_models.schemes_and_methods())]
    assert parts == []


def test_names_after_optim_choose_optimizers(parts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        optimizer_steps, "bench_optim", lambda *chosen, **_: iter(asked.append([*map(list, chosen)]) or ())
    )
    assert run("optim", "muon", "adamw8bit", "--case", "qwen3-0.6b", "--dtype", "bfloat16") == 0
    assert run("optim", "muon") == 0
    assert run("all", "--case", "check") == 0
    everything = [list(optimizer_steps.CONTESTS), list(optimizer_steps.CASES), ["float32", "bfloat16"]]
    assert asked == [
        [["muon", "adamw8bit"], ["qwen3-0.6b"], ["bfloat16"]],
        [["muon"], *everything[1:]],
        everything,
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["muonn"], "bench optim has no optimizer muonn; there are adamw, adamw_clipped"),
        (["muon", "--case", "8x8"], "bench optim has no case 8x8; there are 100x2560x1024, 100x2048x1280, qwen3-0.6b"),
        (["muon", "--dtype", "float16"], "bench optim has no dtype float16; there are float32, bfloat16"),
        (["muon", "--case", "100x2560x1024"], "does not time muon on 100x2560x1024 in float32, bfloat16"),
        (["adamw_master", "--dtype", "float32"], "bench optim does not time adamw_master on"),
    ],
)
def test_a_choice_of_optimizers_that_is_none_says_what_there_is(parts, capsys, arguments, said):
    assert run("optim", *arguments) == 1
    assert said in capsys.readouterr().err
    assert parts == []


def test_other_parts_take_no_names_beside_them(parts, capsys):
    assert run("train", "muon") == 1
    assert "bench train is measured by itself" in capsys.readouterr().err
    assert run("softmax", "optim") == 1


@pytest.mark.parametrize("option", ["--backend=triton", "--dtype=float16", "--direction=backward", "--json=rows.json"])
def test_what_parts_would_read_differently_is_refused(parts, option, capsys):
    assert run("all", option) == 1
    assert "they mean other things to its parts" in capsys.readouterr().err
    assert parts == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--dtype", "int4"], "bench serve does not read --dtype; it reads --device, "),
        (["serve", "--recipe", "demo", "--jobs", "2"], "bench serve does not read --jobs, --recipe"),
        (["memory", "--json", "rows.json"], "bench memory does not read --json"),
        (["softmax", "--model", "smollm2"], "bench of operators does not read --model"),
        (["--micro-batch", "2"], "bench of operators does not read --micro-batch"),
    ],
)
def test_options_that_would_not_be_read_are_refused(parts, arguments, said, capsys):
    assert run(*arguments) == 1
    assert said in capsys.readouterr().err
    assert parts == []


def test_a_wrong_name_tells_what_can_be_measured(parts, capsys):
    assert run("serv") == 1
    said = capsys.readouterr().err
    assert (
        "bench measures operators, and memory, host, optim, layers, train, serve, http, quantize, startup, all by these names"
        in said
    )
    assert "no operator is named 'serv'" in said
    assert parts == []


def test_the_help_names_all_engines():
    (backend,) = [param for param in get_command(app).commands["bench"].params if param.name == "backend"]
    assert all(f"{name}," in backend.help or f"{name})" in backend.help for name in bench_serve.CANDIDATES)


def test_what_is_of_the_present_source_is_not_done_again(parts):
    row = lambda op, case, backend: Row(op, case, "float32", "step", backend, 1.0, source=present_source(op, backend))
    stamp = {"slug": "cpu", "commit": "abc1234", "date": "2031"}
    for name, kept in (
        ("optimizers", row("adamw", "tiny", "torch")),
        ("train", row("train", "python, 4x256", "tilestack")),
    ):
        results.merge(results.path_of("cpu", name), stamp, {}, [kept.as_dict()])
    assert run("all", "--stale") == 0
    assert parts == [
        ("kernels", True),
        ("memory", True),
        ("host", "cpu"),
        ("optim", 1),
        ("layers", 1),
        ("serve", "cpu"),
        ("http", "cpu"),
    ]


def test_what_was_served_on_the_present_source_is_not_served_again(parts, monkeypatch):
    stamp = {"slug": "cpu", "commit": "abc1234", "date": "2031"}
    row = lambda op, case, backend: dict(op=op, case=case, dtype="float32", direction="forward", backend=backend, device="cpu", source=present_source(op, backend, "cpu"))  # fmt: skip
    results.merge(results.path_of("cpu", "serve"), stamp, {}, [row("serve", "batch 1", "tilestack")])
    results.merge(results.path_of("cpu", "http"), stamp, {}, [row("http", "random weights, 64 streams", way) for way in bench_http.WAYS])  # fmt: skip
    kept = []
    monkeypatch.setattr(bench_serve, "bench_serve", lambda *arguments: kept.append(arguments[-1]) or [])
    assert run("serve", "--stale") == run("serve") == run("http", "--stale") == 0
    assert [[row["case"] for row in rows] for rows in kept] == [["batch 1"], []]
    assert parts == []
    assert run("http") == run("http", "--stale", "--model", "other") == 0
    assert parts == [("http", "cpu")] * 2


def test_a_spent_budget_begins_nothing_more(parts, monkeypatch):
    monkeypatch.setattr("tilestack.cli.bench.Asked.seconds_left", lambda self: -1.0)
    assert run("all", "--budget", "1") == 0
    assert parts == [("kernels", True)]  # which looks at the budget itself


def test_what_was_served_is_kept_when_the_next_fails(parts, monkeypatch):
    row = dict(op="serve", case="batch 1", dtype="bfloat16", direction="decode", backend="tilestack", figure=1.0, unit="ms/step", seconds=1.0, roof=0.5)  # fmt: skip

    def fails_later(*_):
        yield row
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_serve, "bench_serve", fails_later)
    assert run("serve", "--save") != 0
    (kept,) = results.load(results.path_of("cpu", "serve"))["rows"]
    assert kept["case"] == "batch 1"


def test_what_was_measured_is_shown_and_kept_when_the_rest_fails(parts, monkeypatch, tmp_path, capsys):
    def then_ctrl_c(*_):
        yield dict(HOST_ROWS[0], op="serve", backend="tilestack")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_serve, "bench_serve", then_ctrl_c)
    monkeypatch.setattr(bench_serve, "render_engines", lambda rows: f"{len(rows)} row of {rows[0]['backend']}")
    assert run("serve", "--save", "--json", "rows.json") == 130
    assert "1 row of tilestack" in capsys.readouterr().out
    assert [row["op"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["serve"]
    (path,) = (tmp_path / "results").rglob("serve.json")
    assert len(results.load(path)["rows"]) == 1


def test_host_times_are_added_to_those_that_are_there(parts, monkeypatch, tmp_path):
    asked, compiling = [], []
    rows = lambda name: [
        dict(HOST_ROWS[0], op=name, case=host_time.smallest(name).name, source=host_time.host_source(name, "triton"))
    ]

    def measured(device, without, jobs, files):
        asked.append(set(without))
        compiling.append((jobs, files))
        yield from (rows(name) for name in ("relu", "add") if name not in without)

    monkeypatch.setattr(host_time, "bench_host", measured)
    monkeypatch.setattr(host_time, "smallest", lambda op: SimpleNamespace(name="case"))
    monkeypatch.setattr("tilestack.cli.bench.Asked.is_over", lambda self: bool(asked))  # after the first
    assert run("host", "--save") == 0
    monkeypatch.setattr("tilestack.cli.bench.Asked.is_over", lambda self: False)
    assert run("host", "--save", "--stale", "--jobs", "3") == 0
    assert asked == [set(), {"relu"}]
    assert compiling == [(1, ()), (3, ())]
    (path,) = (tmp_path / "results").rglob("sweeps/host.json")
    kept = results.load(path)["rows"]
    assert [row["op"] for row in kept] == ["relu", "add"]
    assert all(row["commit"] for row in kept)
    older = [dict(row, source="older") if row["op"] == "add" else row for row in kept]
    assert host_time.current_operators(older) == {"relu"}
    monkeypatch.setattr(host_time, "smallest", lambda op: SimpleNamespace(name="a new case"))
    assert run("host", "--save") == 0
    assert [row["op"] for row in results.load(path)["rows"]] == ["relu", "add"], (
        "the old case stands for nothing any more"
    )


def test_auto_s_table_is_renewed_of_what_was_measured_alone(monkeypatch, tmp_path):
    """The results hold older rows too, of which `tune` may know better."""
    monkeypatch.chdir(tmp_path)
    row = lambda op, case: Row(op, case, "bfloat16", "forward", "triton", time_us=5.0)
    machine = dict(slug="h200", commit="abc", date="2031-05-06")
    path = results.path_of("h200", "kernels")
    results.merge(path, machine, {}, [row("softmax", "8192x4096x-1").as_dict()])

    def measured(*_, **__):
        found = [row("relu", "8192x4096")]
        results.merge(path, machine, {}, [each.as_dict() for each in found])
        return found

    renewed = []
    monkeypatch.setattr(operators, "bench_operators", measured)
    monkeypatch.setattr("tilestack.shipped.checkout", lambda: tmp_path)
    monkeypatch.setattr("tilestack.lab.bench.terminal_tables.render_rows", lambda *_: [])
    monkeypatch.setattr(preferences, "write_table", lambda found, cases: renewed.append((len(found["rows"]), cases)))
    asked = Asked(torch.device("cuda"), machine, True, False, None, None, began=0.0)
    bench_kernels(asked, None, ["forward"], None, "bench", (1, ()), ["relu"])
    assert renewed == [(2, {("relu", "8192x4096", "bfloat16")})]


def test_a_budget_is_of_the_seconds_since_the_command_began(monkeypatch):
    monkeypatch.setattr("tilestack.cli.bench.time", SimpleNamespace(monotonic=lambda: 107.0))
    asked = lambda budget: Asked(None, {}, False, False, budget, None, began=100.0)
    assert [asked(budget).seconds_left() for budget in (10.0, 7.0, None)] == [3.0, 0.0, None]
    assert [asked(budget).is_over() for budget in (10.0, 7.0, None)] == [False, True, False]


def test_what_is_asked_of_operators_reaches_their_bench(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("tilestack.cli.bench.bench_kernels", lambda *given: asked.append(given))
    (tmp_path / "own.py").write_text("")
    options = ["--dtype", "float32,float64", "--direction", "both", "--backend", "torch,aten"]
    options += ["--case", "c", "--jobs", "3", "--load", str(tmp_path / "own.py"), "--save", "--stale", "--budget", "9"]
    assert run("relu", *options) == 0
    ((run_of, *given),) = asked
    ahead = (3, (tmp_path / "own.py",))
    assert given == [["float32", "float64"], ["both"], ["torch", "aten"], "c", ahead, ["relu"]]
    assert (run_of.place.type, run_of.save, run_of.stale, run_of.budget) == ("cpu", True, True, 9.0)
