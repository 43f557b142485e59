"""Tiles of fp8 codes pass the gates where nothing is a whole vector, whatever shares their scales."""

WALK = """
import json, torch
from tilestack.kernels.quantised.fp8_made_tiles import code_gated, code_loss
from tilestack.kernels.quantised.fp8_tiles import code_tiles
from tilestack.lab.compile.absent_gpu import AbsentGpu
rows = []
for capability in (90, 100):
    with AbsentGpu(capability) as gpu:
        for by in ("rows", "blocks"):
            for turned_by in ("rows", "blocks"):
                x = torch.empty(4099, 4097, dtype=torch.bfloat16, device="meta")
                code_tiles(x, by, turned_by, torch.float8_e4m3fn)
                row = torch.empty(4099, device="meta")
                code_loss(x, row, row.long(), -100, by, turned_by, torch.float8_e4m3fn)
                code_gated(None, x[:, :4094], by, turned_by, torch.float8_e4m3fn)
                code_gated(x[:, :2047], x[:, :4094], by, turned_by, torch.float8_e4m3fn)
    rows += [report.row() for report in gpu.reports()]
print(json.dumps(rows))
"""


def test_odd_sides_do_not_spill(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert [row["capability"] for row in rows] == [90] * 16 + [100] * 16
    assert {row["kernel"] for row in rows} == {"code_strips_kernel", "code_made_kernel"}
    assert not [(row["kernel"], row["failures"]) for row in rows if row["failures"]]
