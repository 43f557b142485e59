"""The 8-bit step, which no operator launches, compiles for GPUs that are not here, passes the gates and stays small."""

import pytest

WALK = """
import json, sys
import torch
from tilestack.kernels.optim.eight_bit import BLOCK, step_adam8
from tilestack.kernels.optim.multi_tensor import Table
from tilestack.kernels.optim.steps import ADAM_RECORD
from tilestack.lab.compile.absent_gpu import AbsentGpu
rows = []
for dtypes, master, stochastic in (
    ((torch.float32, torch.float32), False, False),
    ((torch.bfloat16, torch.bfloat16), False, False),
    ((torch.bfloat16, torch.bfloat16), False, True),
    ((torch.float16, torch.float32), True, False),
):
    with AbsentGpu(int(sys.argv[1])) as gpu:
        table = Table([1024 * 512] * 3, 7 + master, BLOCK, torch.device("meta"), ADAM_RECORD.value)
        step_adam8(table, torch.empty(2, 256, device="meta"), dtypes, torch.empty((), device="meta"), 0, True, master, stochastic)
        rows += [report.row() for report in gpu.reports()]
print(json.dumps(rows))
"""
REGISTERS = 65536  # of a multiprocessor, for all programs on it


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_8bit_step_passes_the_gates(uninterpreted, capability):
    rows = uninterpreted("-c", WALK, str(capability))
    assert [row["kernel"] for row in rows] == ["adam8_kernel"] * 4
    assert [row["failures"] for row in rows if row["failures"]] == []
    assert all(row["instructions"]["ld.v4"] and row["instructions"]["st.v4"] for row in rows)
    # As many warps as keep memory busy; masked tiles, which are rare, took the registers of half of them.
    assert [row for row in rows if REGISTERS // (row["registers"] * 32) < 20] == []
