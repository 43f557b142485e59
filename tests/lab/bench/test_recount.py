"""Kept rates are those of the present cost model, whenever they were measured."""

from copy import deepcopy
from pathlib import Path

import pytest

from tilestack.contract.registry import load_kernels
from tilestack.lab import results
from tilestack.lab.bench import recount
from tilestack.lab.bench.roofs import Roofs

ROOFS = Roofs(copy_tb_per_s=4.0, matmul_tflops={"bfloat16": 700.0, "float32": 50.0}, host_floor_us=5.0)
KEPT = sorted((Path(__file__).parents[3] / "results").glob("*/kernels.json"))


def row(op, case, direction, moved, time_us=10.0, flops=1e6):
    rates = dict(tb_per_s=moved / time_us * 1e-6, tflops=flops / time_us * 1e-6, roof_fraction=moved / 4e6 / time_us)
    return dict(
        op=op, case=case, dtype="bfloat16", direction=direction, backend="triton", time_us=time_us, host_us=9.0, **rates
    )


def test_bytes_that_are_no_more_counted_are_taken_from_the_rates():
    ids, tokens = 8192 * 8, 8192 * 1024 * 2
    right = ids + 8 * 1024 * 2 + tokens  # eight rows of the table, each looked up a thousand times
    rows = [
        row("embedding", "8192x151936x1024x8", "forward", ids + 2 * tokens),
        row("embedding", "8192x151936x1024x8", "forward", right * 1.005),  # as far off as a draw may be
        row("softmax", "8192x4096x-1", "forward", 4 * 8192 * 4096),
        row("once_there", "8192", "forward", 1e9),
        row("softmax", "8192x4096x-1", "backward", 1e9) | {"time_us": None},
    ]
    before = deepcopy(rows)
    assert recount.recount(rows, ROOFS) == rows[:1]
    assert rows[1:] == before[1:]
    assert rows[0]["tb_per_s"] == pytest.approx(right / 10 * 1e-6)
    assert rows[0]["roof_fraction"] == pytest.approx(right / 4e6 / 10)
    assert rows[0] | {name: before[0][name] for name in ("tb_per_s", "roof_fraction")} == before[0]


def test_a_file_is_written_where_it_was_wrong_alone(tmp_path):
    path = tmp_path / "kernels.json"
    right = row("softmax", "8192x4096x-1", "backward", 6 * 8192 * 4096)
    for kept, corrected in ((right, 0), (row("softmax", "8192x4096x-1", "backward", 9 * 8192 * 4096), 1)):
        results.save(path, dict(machine={}, roofs=ROOFS.as_dict(), rows=[kept]))
        written = path.stat().st_mtime_ns
        assert len(recount.recount_file(path)) == corrected
        assert results.load(path)["rows"] == [right]
        assert (path.stat().st_mtime_ns > written) == bool(corrected)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_what_is_published_is_of_the_present_cost_model(path):
    load_kernels()
    kept = results.load(path)
    wrong = recount.recount(kept["rows"], Roofs(**kept["roofs"]))
    assert not wrong, "run `make docs`, which counts anew"
