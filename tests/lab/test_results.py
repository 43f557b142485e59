"""Results on disk: merged row by row, replaced in one step."""

import json
import os
from pathlib import Path

import pytest

from tilestack.lab import results


def machine(date="2026-01-01T00:00:00Z", commit="abc"):
    return {"slug": "h200", "commit": commit, "date": date}


def row(backend="triton", time_us=1.0, case="8x8"):
    return dict(op="softmax", case=case, dtype="bfloat16", direction="forward", backend=backend, time_us=time_us)


def test_a_run_replaces_what_it_measured_again_and_keeps_the_rest(tmp_path):
    path = results.path_of("h200", "kernels", tmp_path)
    results.merge(path, machine(commit="old"), {"copy_tb_per_s": 4.0}, [row("triton"), row("aten")])
    results.merge(path, machine(commit="new"), {"copy_tb_per_s": 4.2}, [row("triton", 0.5), row("triton", case="9x9")])
    found = results.load(path)
    assert [(r["backend"], r["case"], r["time_us"], r["commit"]) for r in found["rows"]] == [
        ("triton", "8x8", 0.5, "new"),
        ("aten", "8x8", 1.0, "old"),
        ("triton", "9x9", 1.0, "new"),
    ]
    assert found["machine"]["commit"] == "new"
    assert found["roofs"] == {"copy_tb_per_s": 4.2}


@pytest.mark.parametrize("name", results.IDENTITY)
def test_rows_that_differ_in_any_part_of_their_identity_are_all_kept(tmp_path, name):
    path = results.path_of("h200", "kernels", tmp_path)
    results.merge(path, machine(), {}, [row()])
    results.merge(path, machine(), {}, [row() | {name: "another"}])
    assert [each[name] for each in results.load(path)["rows"]] == [row()[name], "another"]
    assert set(results.IDENTITY) == set(row()) - {"time_us"}


@pytest.mark.parametrize(
    ("there", "here", "same"),
    [
        (dict(gpu="NVIDIA H200", cpu="Xeon"), dict(gpu="NVIDIA H200", cpu="EPYC"), True),
        (dict(gpu="NVIDIA H200", cpu="Xeon"), dict(gpu="NVIDIA A100", cpu="Xeon"), False),
        (dict(gpu="NVIDIA H200", cpu="Xeon"), dict(gpu=None, cpu="Xeon"), False),
        (dict(gpu=None, cpu="Xeon"), dict(gpu=None, cpu="Xeon"), True),
        (dict(gpu=None, cpu="Xeon"), dict(gpu=None, cpu="EPYC"), False),
    ],
)
def test_figures_of_another_machine_never_stand_beside_those_of_this_one(tmp_path, there, here, same):
    path = results.path_of("h200", "kernels", tmp_path)
    results.merge(path, machine() | there, {}, [row()])
    before = path.read_bytes()
    if same:
        results.merge(path, machine() | here, {}, [row("aten")])
        assert len(results.load(path)["rows"]) == 2
    else:
        with pytest.raises(ValueError, match="move it away first"):
            results.merge(path, machine() | here, {}, [row("aten")])
        assert path.read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "h200" / "kernels.json"
    results.merge(path, machine(), {}, [row()])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.merge(path, machine(), {}, [row(time_us=float("nan"))])

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        results.merge(path, machine(), {}, [row("aten")])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["kernels.json"]


def test_loading_finds_every_gpu(tmp_path):
    for name, date in [("a", "2026-03-01T00:00:00Z"), ("b", "2026-02-01T00:00:00Z")]:
        results.merge(results.path_of("h200", name, tmp_path), machine(date), {}, [row()])
    results.merge(results.path_of("a100", "a", tmp_path), machine("2027-01-01T00:00:00Z"), {}, [row()])
    assert [path.parent.name for path in results.load_all(tmp_path)] == ["a100", "h200", "h200"]


def test_proofs_lie_beside_results_and_are_none(tmp_path):
    results.merge(results.path_of("h200", "kernels", tmp_path), machine(), {}, [row()])
    (tmp_path / "h200" / "proofs.json").write_text(json.dumps({"proofs": []}))
    assert [path.name for path in results.load_all(tmp_path)] == ["kernels.json"]


@pytest.mark.parametrize(("text", "complaint"), [("{", "not JSON"), (json.dumps({"rows": []}), "no machine, roofs")])
def test_a_file_that_is_no_results_file_is_named(tmp_path, text, complaint):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"broken.json.*{complaint}"):
        results.load(path)
