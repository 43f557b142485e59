"""The bench on a CPU, end to end: every field there and consistent, failures as notes, peers that exist."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from made_up import MACHINE, rows_of_two_backends
from rich.console import Console

from tilestack import contract, ops
from tilestack.contract.cases import Make
from tilestack.lab import results
from tilestack.lab.bench import idioms, peers, roofs, terminal_tables, watch
from tilestack.lab.bench import operators as lab
from tilestack.lab.bench.candidates import candidate_of, differentiable, names_of
from tilestack.lab.bench.operators import bench_operators
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.bench.timing import Timing
from tilestack.lab.machine import stamp
from tilestack.lab.rows import Row
from tilestack.lab.stale import present_source

ROOFS = Roofs(copy_tb_per_s=0.01, matmul_tflops={"float32": 0.05}, host_floor_us=2.0)


@pytest.fixture(autouse=True)
def _known_roofs(monkeypatch):
    monkeypatch.setattr(lab, "measure_roofs", lambda device: ROOFS)


@pytest.fixture
def failing_backend(outside):
    def broken(x, dim):
        raise RuntimeError("planted failure")

    contract.implements(ops.softmax, backend="planted", backward=contract.AUTOGRAD)(broken)
    return "planted"


def test_a_row_has_exactly_the_published_fields():
    published = "op case dtype direction backend time_us spread host_us tb_per_s tflops roof_fraction ratio_to_best_peer verdict peak_mib how note source lender cosine relative_error"
    assert [field.name for field in fields(Row)] == published.split()


def test_the_figures_of_a_row_agree_with_one_another():
    rows = bench_operators([ops.rms_norm], cases="5x1000", device="cpu")
    assert [(row.direction, row.backend) for row in rows] == [
        (direction, backend) for direction in ("forward", "backward") for backend in ("torch", "aten")
    ]
    arguments = dict(x=torch.empty(5, 1000), weight=torch.empty(1000), eps=1e-6)
    for row in rows:
        flops, moved = ops.rms_norm.cost(arguments, row.direction)
        assert row.note == ""
        assert row.how == "cpu"
        assert row.time_us == row.host_us
        assert row.tb_per_s == pytest.approx(moved / 1e12 / (row.time_us / 1e6))
        assert row.tflops == pytest.approx(flops / 1e12 / (row.time_us / 1e6))
        assert row.roof_fraction == pytest.approx(ROOFS.floor_us(flops, moved, "float32") / row.time_us)
    forward = {row.backend: row for row in rows if row.direction == "forward"}
    assert forward["torch"].ratio_to_best_peer == pytest.approx(forward["aten"].time_us / forward["torch"].time_us)
    assert forward["aten"].ratio_to_best_peer == 1.0


def test_more_than_the_roof_of_a_cpu_is_explained():
    row = lambda: Row("rms_norm", "5x1000", "float32", "forward", "aten")
    timing = lambda time_us: Timing(time_us=time_us, how="cpu")
    above, below = (lab.figures(row(), timing(time_us), 0, 1e6, ROOFS) for time_us in (80.0, 110.0))
    assert (above.roof_fraction, above.note) == (pytest.approx(1.25), "the inputs stay in cache")
    assert (below.roof_fraction, below.note) == (pytest.approx(100 / 110), "")


def test_the_roof_of_a_cpu_is_the_best_that_was_seen(monkeypatch):
    seen = iter([9e-6, 3e-6, 7e-6])
    monkeypatch.setattr(roofs, "processor_seconds", lambda call, times: next(seen))
    monkeypatch.setattr(roofs, "CPU_ATTEMPTS", 3)
    assert roofs.least_us(lambda: None) == pytest.approx(3.0)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_failing_backend_is_a_note_beside_the_figures_of_the_others(failing_backend, direction):
    rows = {
        row.backend: row
        for row in bench_operators([ops.softmax], cases="3x33x-1", directions=[direction], device="cpu")
    }
    assert rows["planted"].note == "RuntimeError: planted failure"
    assert rows["planted"].time_us is None
    assert rows["planted"].ratio_to_best_peer is None
    assert rows["aten"].time_us > 0


def test_a_backend_asked_for_by_name_says_why_it_cannot_be_timed():
    rows = bench_operators(
        [ops.softmax], cases="3x33x-1", directions=["forward"], backends=["triton", "liger", "nonsense"], device="cpu"
    )
    triton, liger, nonsense = rows
    assert triton.time_us is None
    assert "interpret" in triton.note.lower()
    assert liger.note == "liger needs a GPU"
    assert nonsense.note == "softmax has no backend or peer nonsense here"


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (dict(directions=["sideways"]), "sideways; there are forward, backward, both"),
        (dict(dtypes=["bf16"]), "no dtype is called bf16"),
        (dict(cases="7x7"), "softmax has no case '7x7'"),
    ],
)
def test_what_cannot_be_measured_is_an_error_for_people(asked, complaint):
    with pytest.raises(ValueError, match=complaint):
        bench_operators([ops.softmax], device="cpu", **asked)


def test_only_gradients_that_cost_something_are_timed():
    of = lambda operator, **arguments: differentiable(operator, operator.bind(**arguments))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert of(ops.add, x=x, y=y) == [], "both gradients are the arriving one"
    assert of(ops.transpose, x=x) == of(ops.reduce_sum, x=x, dim=0) == [], "a view of what arrives"
    assert of(ops.axpy, x=x, y=y, alpha=2.0) == ["x", "y"]
    assert of(ops.rms_norm, x=x) == ["x"]
    q = torch.randn(1, 2, 1, 4)
    assert of(ops.rope_, q=q, k=q.clone(), cos=torch.ones(2, 2), sin=torch.ones(2, 2)) == [], "it writes over q and k"
    assert of(ops.softmax, x=x) == ["x"]
    assert bench_operators([ops.add], cases="33", directions=["backward"], device="cpu") == []


def test_on_a_cpu_each_operator_has_one_bearable_case():
    for described in ops.operators():
        (case,) = lab.cases_of(described, "bench", "float32", "cpu")
        arguments = described.bind(**case.build(Make(torch.float32, "meta")))
        flops, moved = described.cost(arguments)
        assert flops <= lab.CPU_FLOPS
        assert moved <= lab.CPU_BYTES
    assert len(lab.cases_of(ops.softmax, "bench", "bfloat16", "cuda")) > 3


def test_on_a_cpu_the_case_that_moves_most_is_measured():
    """As long as it is bearable there, and whatever it computes."""
    costs = dict(computing=(1e9, 100), moving=(1e3, 1000), slow=(1e10, 2000), large=(1e3, 2**28))
    made = type("Made", (SimpleNamespace,), dict(__hash__=object.__hash__))
    every = [made(name=name, build=lambda make, cost=cost: dict(cost=cost)) for name, cost in costs.items()]
    described = SimpleNamespace(cases=every, bind=lambda **given: given, cost=lambda given: given["cost"])
    assert [case.name for case in lab.cases_of(described, "bench", "float32", "cpu")] == ["moving"]


def test_backward_does_the_work_again_at_every_call():
    wanted = ["x", "weight"]
    arguments = ops.rms_norm.bind(x=torch.randn(4, 32), weight=torch.randn(32))
    peer = peers.Peer(ops.rms_norm)
    candidate = candidate_of(ops.rms_norm, peer, arguments, wanted, "backward")
    with candidate.scope():
        first, second = candidate.prepare(2)
        once, again = first(), first()
    assert [g.shape for g in once] == [(4, 32), (32,)]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(once, again, strict=True))
    assert second()[0].shape == (4, 32)
    assert arguments["x"].requires_grad is False, "a candidate works on copies"


def test_forward_is_timed_without_gradients():
    arguments = ops.softmax.bind(x=torch.randn(4, 32))
    candidate = candidate_of(ops.softmax, peers.Peer(ops.softmax), arguments, [], "forward")
    with candidate.scope():
        (call,) = candidate.prepare(1)
        assert not call().requires_grad


def test_rows_are_on_disk_before_the_next_comparison_starts(tmp_path, monkeypatch):
    path = tmp_path / "cpu" / "bench.json"
    seen = []

    def stop_at_the_second(*arguments):
        seen.append(path.exists() and len(results.load(path)["rows"]))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    original = lab.measure
    monkeypatch.setattr(lab, "measure", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        bench_operators([ops.softmax], cases="3x33x-1", device="cpu", save=path)
    assert seen == [False, 2]
    saved = results.load(path)
    assert {row["direction"] for row in saved["rows"]} == {"forward"}
    assert saved["roofs"] == ROOFS.as_dict()
    assert saved["machine"]["slug"] == "cpu"
    json.dumps(saved, allow_nan=False)


def test_tables_say_cpu_and_show_losses_like_wins():
    rows = [
        Row("softmax", "8x8", "float32", "forward", "triton", time_us=10.0, ratio_to_best_peer=0.5, how="cpu"),
        Row("softmax", "8x8", "float32", "forward", "aten", time_us=5.0, ratio_to_best_peer=1.0, how="cpu"),
        Row("relu", "8", "float32", "forward", "triton", note="out of memory [/bytes]"),
    ]
    console = Console(width=200)
    tables = terminal_tables.render_rows(rows, stamp("cpu"))
    assert [len(table.rows) for table in tables] == [2, 1]
    with console.capture() as shown:
        for table in tables:
            console.print(table)
    assert "CPU only" in shown.get()
    assert "0.50" in shown.get()
    assert "out of memory [/bytes]" in shown.get()


def test_after_the_cases_of_an_operator_stand_their_means():
    rows = [Row.from_dict(row) for row in rows_of_two_backends()]
    cases, means = terminal_tables.render_rows(rows, MACHINE)
    assert len(cases.rows) == 10
    console = Console(width=80)
    with console.capture() as shown:
        console.print(means)
    lines = [[cell.strip() for cell in line.split("│")[3:7]] for line in shown.get().splitlines() if "forward" in line]
    assert lines == [
        ["fastest of ours", "3", "0.79×", "0.12×"],  # (2 · 1/8 · 2)^⅓
        ["gluon", "2 of 3", "2.00×", "2.00×"],
        ["triton", "3", "0.40×", "0.12×"],  # (1 · 1/8 · 1/2)^⅓
    ]
    assert len(terminal_tables.render_rows(rows[:4], MACHINE)) == 1, "of one case there is no mean"


def test_a_narrow_terminal_cuts_no_number():
    row = Row(
        "softmax",
        "1024x16384x-1",
        "float32",
        "backward",
        "torch",
        732044.1,
        0.67,
        732044.1,
        0.00123,
        0.00456,
        0.03,
        0.04,
        how="cpu",
    )
    console = Console(width=80)
    with console.capture() as shown:
        for table in terminal_tables.render_rows([row], stamp("cpu")):
            console.print(table)
    assert "…" not in shown.get()
    for whole in ("backward", "torch", "732 ms", "1.23", "GB/s", "1024×16384"):
        assert whole in shown.get()


def test_peers_are_named_after_operators_and_take_their_arguments():
    operators = {described.name: described for described in ops.operators()}
    for functions in (idioms.IDIOMS, *(functions for _, functions in peers.LIBRARIES.values())):
        for name, function in functions.items():
            taken = function.setup if isinstance(function, peers.Prepared) else function
            assert set(peers.parameters_of(taken)) <= set(operators[name].parameters)


def test_a_library_that_is_importable_becomes_a_peer(monkeypatch):
    twice = {"relu": lambda x: x * 2, "softmax": lambda x, dim: NotImplemented}
    monkeypatch.setitem(peers.LIBRARIES, "mine", ("json", twice))
    monkeypatch.setitem(peers.LIBRARIES, "absent", ("no_such_module", twice))
    found = peers.peers_of(ops.relu)
    assert list(found) == ["compile", "compile-max", "mine"]
    assert found["mine"].run(torch.tensor(3)) == 6
    with pytest.raises(NotImplementedError, match="no softmax for these arguments"):
        peers.peers_of(ops.softmax)["mine"].run(torch.ones(2), -1)


def test_what_is_timed_unless_asked_for():
    assert names_of(ops.attention, "cuda") == [name for name in ops.attention.implementations if name != "torch"]
    assert names_of(ops.attention, "cpu") == ["torch", "aten"]


def test_what_people_write_is_also_compiled_in_both_modes():
    assert list(peers.peers_of(ops.dropout)) == [
        "compile", "compile-max", "eager", "eager-compile", "eager-compile-max",
    ]  # fmt: skip
    assert set(peers.peers_of(ops.dropout)) <= set(peers.PEERS)


def test_what_is_prepared_once_is_not_compiled():
    assert list(peers.peers_of(ops.block_sparse_dsd)) == ["compile", "compile-max", "eager"]
    values, place = torch.randn(1, 16, 16), torch.zeros(1, dtype=torch.int32)
    dense, x = peers.peers_of(ops.block_sparse_dsd)["eager"].setup(values, place + 1, place, torch.randn(16, 3), 2)
    assert dense.shape == (32, 16)
    assert torch.equal(dense[16:], values[0])
    assert x.shape == (16, 3)


def test_what_is_prepared_once_is_not_timed():
    happened = []
    peer = peers.Peer(lambda x: happened.append("run") or x, setup=lambda x, dim: happened.append("setup") or (x,))
    candidate = candidate_of(ops.softmax, peer, ops.softmax.bind(x=torch.randn(2, 3)), [], "forward")
    with candidate.scope():
        (call,) = candidate.prepare(1)
        call()
        call()
    assert happened == ["setup", "run", "run"]


def test_rows_carry_the_source_they_measured():
    rows = {
        row.backend: row
        for row in bench_operators([ops.softmax], cases="3x33x-1", directions=["forward"], device="cpu")
    }
    assert rows["torch"].source == present_source("softmax", "torch") != ""
    assert rows["aten"].source == "", "PyTorch's version is in the stamp"


def test_only_what_is_not_of_the_present_source_is_measured_again():
    rows = [row.as_dict() for row in bench_operators([ops.softmax], cases="3x33x-1", device="cpu")]
    again = lambda rows: {
        (row.op, row.direction)
        for row in bench_operators([ops.softmax, ops.add, ops.relu], cases="33", device="cpu", stale=rows)
    }
    assert again([]) == {("add", "forward"), ("relu", "forward"), ("relu", "backward")}
    assert bench_operators([ops.softmax], cases="3x33x-1", device="cpu", stale=rows) == []
    changed = [row | {"source": "another"} if row["direction"] == "backward" else row for row in rows]
    found = bench_operators([ops.softmax], cases="3x33x-1", device="cpu", stale=changed)
    assert {(row.direction, row.backend) for row in found} == {("backward", "torch"), ("backward", "aten")}


def test_a_backend_that_is_new_to_a_case_is_measured(outside):
    rows = [row.as_dict() for row in bench_operators([ops.relu], cases="33", device="cpu")]
    contract.implements(ops.relu, backend="mine")(lambda x: x.clamp_min(0))
    found = bench_operators([ops.relu], cases="33", device="cpu", stale=rows)
    assert [(row.direction, bool(row.time_us)) for row in found if row.backend == "mine"] == [
        ("forward", True),
        ("backward", False),
    ]
    again = rows + [row.as_dict() for row in found]
    assert bench_operators([ops.relu], cases="33", device="cpu", stale=again) == [], "that it refuses is known"


def test_what_was_measured_without_the_usual_code_is_measured_again_where_peers_are():
    case = next(case for case in ops.dropout.cases if case.name == "33x0.1")
    subjects = [lab.Subject(ops.dropout, case, "float32", ("forward",))]
    ours, peers = (
        [
            dict(op="dropout", case=case.name, dtype="float32", direction="forward", backend=name, source=source)
            for name, source in names.items()
        ]
        for names in (
            {name: present_source("dropout", name) for name in lab.names_of(ops.dropout, "cpu")},
            {"compile": "", "eager": ""},
        )
    )
    again = lambda rows, **options: bool(lab.not_of_the_present(subjects, rows, "cpu", **options))
    assert not again(ours)
    assert again([*ours, peers[0]], with_peers=True)
    assert not again([*ours, *peers], with_peers=True)


def test_a_budget_ends_a_run_between_cases_and_keeps_what_was_measured(tmp_path, monkeypatch):
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: next(now)))  # which no other thread reads
    path = tmp_path / "cpu" / "bench.json"
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    rows = bench_operators([ops.softmax, ops.relu, ops.gelu], cases="check", directions=["forward"], device="cpu", save=path, budget=60, console=console)  # fmt: skip
    said = console.export_text()
    assert 0 < len({row.case for row in rows}) < len(ops.softmax.cases)
    assert len(results.load(path)["rows"]) == len(rows)
    assert "cases are left" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "codes"),
    [("linear_int8", True), ("linear_fp8", True), ("conv2d_int8", True), ("attention_fp8", True), ("linear_weight_only", False), ("linear", False), ("relu", False)],
)  # fmt: skip
def test_products_of_codes_are_held_against_the_roof_of_codes(name, codes):
    operator = ops.operator_named(name)
    arguments = operator.bind(**operator.cases[0].build(Make(torch.float32, "meta")))
    assert lab.multiplies_codes(operator, arguments) is codes
