"""Adam's step and its 8-bit one, which no operator launches, compile for GPUs that are not here, pass the gates and leave
room for each other."""

import pytest

WALK = """
import json, sys
import torch
from tilestack.kernels.optim.eight_bit import BLOCK, step_adam8
from tilestack.kernels.optim.multi_tensor import Table
from tilestack.kernels.optim.steps import ADAM_RECORD, block_for, step_adam
from tilestack.lab.compile.absent_gpu import AbsentGpu
skipped, values = torch.empty((), device="meta"), torch.empty(2, 256, device="meta")
table = lambda rows, block: Table([1024 * 512] * 3, rows, block, torch.device("meta"), ADAM_RECORD.value)
rows = []
for param, grad, master, stochastic in (
    (torch.float32, torch.float32, False, False),
    (torch.bfloat16, torch.bfloat16, False, False),
    (torch.bfloat16, torch.bfloat16, False, True),
    (torch.float16, torch.float32, True, False),
):
    with AbsentGpu(int(sys.argv[1])) as gpu:
        step_adam8(table(7 + master, BLOCK), values, (param, grad), skipped, 0, True, master, stochastic)
        dtypes = param, grad, torch.float32 if master else param
        step_adam(table(5 + master, block_for(*dtypes)), dtypes, skipped, 0, True, False, master, stochastic)
        rows += [report.row() for report in gpu.reports()]
print(json.dumps(rows))
"""
REGISTERS = 65536  # of a multiprocessor, for all programs on it


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_adams_steps_pass_the_gates(uninterpreted, capability):
    rows = uninterpreted("-c", WALK, str(capability))
    assert [row["kernel"] for row in rows] == ["adam8_kernel", "adam_kernel"] * 4
    assert [row["failures"] for row in rows if row["failures"]] == []
    assert all(row["instructions"]["ld.v4"] and row["instructions"]["st.v4"] for row in rows)
    # More than the 16 warps for which masked tiles, which are rare, left registers.
    warps = [REGISTERS // (row["registers"] * 32 * row["num_warps"]) * row["num_warps"] for row in rows]
    assert min(warps) >= 20
