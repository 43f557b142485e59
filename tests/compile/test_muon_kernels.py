"""Muon's own kernels, which no operator launches, compile for GPUs that are not here and pass the gates."""

import pytest

WALK = """
import json, sys
import torch
from tilestack.kernels.optim.multi_tensor import Table
from tilestack.kernels.optim.muon import step_muon
from tilestack.kernels.optim.steps import block_for
from tilestack.lab.compile.absent_gpu import AbsentGpu
group = dict(momentum=0.95, nesterov=True, maximize=False, eps=1e-7, ns_steps=2, ns_coefficients=(3.4, -4.8, 2.0), lr=0.02, weight_decay=0.1)
rows = []
for param, grad, state, master in ((torch.float32, torch.float32, torch.float32, False), (torch.bfloat16, torch.bfloat16, torch.float32, True)):
    with AbsentGpu(int(sys.argv[1])) as gpu:
        table = Table([1024 * 512] * 3, 3 + master, block_for(param, state), torch.device("meta"))
        flag = torch.empty((), device="meta")
        step_muon(table, (1024, 512), (param, grad, state, torch.bfloat16), group, 1.0, master, flag, flag, flag)
        rows += [report.row() for report in gpu.reports()]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_step_passes_the_gates(uninterpreted, capability):
    rows = uninterpreted("-c", WALK, str(capability))
    assert {row["kernel"] for row in rows} == {
        "muon_momentum_kernel", "norm_of_matrices_kernel", "gram_fwd_kernel", "newton_schulz_product_kernel", "muon_apply_kernel",
    }  # fmt: skip
    assert [(row["kernel"], row["failures"]) for row in rows if row["failures"]] == []
    own = [row for row in rows if row["kernel"].startswith("muon")]
    assert all(row["instructions"]["ld.v4"] and row["instructions"]["st.v4"] for row in own)
