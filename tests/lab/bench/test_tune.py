"""What `tilestack tune` proves and times, on a CPU and with a made-up clock."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from tilestack import contract, ops
from tilestack.cli import app
from tilestack.contract import BackendError, registry
from tilestack.contract.cases import Make
from tilestack.lab import machine
from tilestack.lab.bench import tune
from tilestack.lab.bench.timing import Timing
from tilestack.tuning.preferences import make_table

CPU = torch.device("cpu")
registry.load_kernels()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_without_a_gpu_it_explains_itself():
    result = CliRunner().invoke(app, ["tune", "linear"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit | BackendError)
    with pytest.raises(BackendError, match="there is no CUDA GPU here"):
        tune.needs_gpu()


@pytest.fixture
def searched(monkeypatch):
    """A search for softmax over two configurations of a backend, one of them wrong."""
    configs = {"right": 1.0, "wrong": 1.5, "slow": 1.0}
    monkeypatch.setattr(ops.softmax, "implementations", dict(ops.softmax.implementations))
    contract.implements(ops.softmax, backend="mine", configs=configs, backward=contract.AUTOGRAD)(
        lambda x, dim, config: torch.softmax(x, dim) * config
    )
    asked = []

    def measure(ways, moved, device):
        asked.extend(ways)
        return {name: Timing(time_us=2.0 if name == "mine:right" else 5.0) for name in ways}

    monkeypatch.setattr(tune, "measure", measure)
    case = next(case for case in ops.softmax.cases if case.kind == "check")
    search = tune.Search(ops.softmax, case, torch.float32, CPU)
    monkeypatch.setattr(search, "candidates", lambda: ["mine:right", "mine:wrong", "mine:slow", "aten"])
    yield search, asked
    ops.softmax.plans.clear()


def test_every_candidate_is_proved_before_it_is_timed(searched):
    search, asked = searched
    found = search.run(kept=8, over=lambda: False)
    assert "mine:wrong" not in asked
    assert found.trials[0].name == "mine:right"
    assert found.trials[0].time_us == 4.0, "forward and backward together"
    wrong = next(trial for trial in found.trials if trial.name == "mine:wrong")
    assert wrong.note.startswith("wrong: forward")
    rows = [row | dict(case=found.case.name) for row in found.rows()]
    assert make_table(rows)["softmax"]["default"][:1] == ["mine:right"]
    assert tune.render_tuned([found]).row_count == 1
    nothing = dataclasses.replace(found, trials=[dataclasses.replace(t, time_us=None) for t in found.trials])
    assert tune.render_tuned([nothing]).row_count == 1


def test_candidates_are_all_backends_in_all_configurations():
    case = next(case for case in ops.linear.cases if case.name == "3x24x304")
    names = tune.Search(ops.linear, case, torch.float16, CPU).candidates()
    assert {"aten", "triton", "triton_gemv:2x512", "triton_split_k:64x64x4"} <= set(names)
    assert "torch" not in names
    assert "triton_gemv" not in names


class Processors:
    multi_processor_count = 132


CONFIGURED = [op for op in ops.operators() if any(way.configs for way in op.implementations.values())]


@pytest.mark.parametrize("operator", CONFIGURED, ids=lambda op: op.name)
def test_every_configuration_has_a_prediction_or_none_for_every_case(operator, monkeypatch):
    """Whatever an operator's key holds beside sizes: an activation, a format, what shares a scale."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Processors)
    for case in (case for case in operator.cases if case.kind == "bench"):
        arguments = operator.bind(**case.build(Make(torch.bfloat16, "meta")))
        search = tune.Search(operator, operator.cases[0], torch.bfloat16, CPU)
        search.arguments = arguments
        names = [f"{name}:{config}" for name, way in operator.implementations.items() for config in way.configs]
        predictions = [search.predict(name) for name in names]
        assert all(found is None or found > 0 for found in predictions)


def test_what_was_proved_ahead_is_not_proved_again(searched, monkeypatch):
    search, _ = searched
    monkeypatch.setattr(tune, "prove", lambda claim: pytest.fail(f"{claim.config} was proved again"))
    search.proved = ["mine:right", "mine:slow", "aten", "mine:wrong"]
    assert [trial.time_us for trial in search.run(kept=8, over=lambda: False).trials] == [4.0, 10.0, 10.0, 10.0]


def test_processes_find_what_is_promising_and_right(searched, monkeypatch):
    search, _ = searched
    monkeypatch.setattr(tune, "Search", lambda *given: search)
    asked = "softmax", search.case.name, torch.float32, CPU, (), False, 8
    assert tune.prove_subject(*asked) == ["mine:right", "mine:slow", "aten"]


def test_a_backend_that_nothing_has_is_refused():
    with pytest.raises(ValueError, match=r"no backend of what is tuned is named tritn; there are .*triton_split_k"):
        next(tune.tune([ops.linear], [torch.bfloat16], backends=["tritn"]))


@pytest.mark.parametrize("broken", [False, True])
def test_what_was_tuned_before_an_end_is_shown_and_kept(searched, monkeypatch, tmp_path, broken):
    """Ctrl-C in the second case; and where the table could not be kept, nothing is measured at all."""
    search, _ = searched

    def one_and_an_end(*_):
        yield search.run(kept=8, over=lambda: False)
        raise KeyboardInterrupt

    table = tmp_path / "tilestack" / "tuning" / "made-up.json"
    if broken:
        table.parent.mkdir(parents=True)
        table.write_text("{")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "needs_gpu", lambda: None)
    monkeypatch.setattr(tune, "tune", one_and_an_end)
    monkeypatch.setattr(machine, "stamp", lambda _: dict(slug="made-up"))
    rows = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["tune", "softmax", "--json", str(rows)])
    assert result.exit_code != 0
    if broken:
        assert "delete it" in result.output + str(result.exception)
        assert table.read_text() == "{"
    else:
        assert f"auto reads {table}" in result.output.replace("\n", "")
        assert "mine:right" in table.read_text()
        assert "right" in rows.read_text()


def test_all_cases_of_a_bucket_rank_it(searched, monkeypatch, tmp_path):
    """Not the last of them alone, which some backends may refuse."""
    search, _ = searched

    def two_of_a_bucket(*_):
        first = search.run(kept=8, over=lambda: False)
        yield first
        yield dataclasses.replace(
            first, times={("aten", "forward"): 5.0, ("aten", "backward"): 5.0}, trials=first.trials[:1]
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "needs_gpu", lambda: None)
    monkeypatch.setattr(tune, "tune", two_of_a_bucket)
    monkeypatch.setattr(machine, "stamp", lambda _: dict(slug="made-up"))
    assert CliRunner().invoke(app, ["tune", "softmax"]).exit_code == 0
    (ranking,) = json.loads((tmp_path / "tilestack" / "tuning" / "made-up.json").read_text())["softmax"][
        "float32"
    ].values()
    assert ranking[0] == "mine:right"
