"""Every epilogue of the fused product in Gluon passes the gates in every configuration that it is compiled in."""

WALK = """
import json, torch
from tilestack.kernels.hopper.fused import CONFIGS, fused_product
from tilestack.kernels.matmul.epilogue import Epilogue
from tilestack.lab.compile.absent_gpu import AbsentGpu
matrix = lambda *sides: torch.empty(sides, dtype=torch.bfloat16, device="meta")
side = matrix(4096, 4096)
# The epilogues that ask for most: the error function, and a residual beside what a gradient will ask for.
epilogues = [Epilogue("gelu", side, None, 0.0, side), Epilogue("gelu", side), Epilogue("silu", None, None, 0.0, side)]
with AbsentGpu(90) as gpu:
    for config in CONFIGS.values():
        for epilogue in epilogues:
            fused_product(side, side.T, matrix(4096), config, epilogue)
print(json.dumps([report.row() for report in gpu.reports()]))
"""


def test_no_epilogue_spills(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert {row["kernel"] for row in rows} == {"fused_hopper_kernel"}
    assert {row["constants"]["BLOCK_N"] for row in rows} == {64, 128, 256}
    assert not [(row["constants"], row["failures"]) for row in rows if row["failures"]]
