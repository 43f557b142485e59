"""Every kernel of the registry, forward and backward, compiles for GPUs that are not here and passes the gates.

On sm_90 in all cases that tell something; on the others in one of each operator, for time.
"""

import pytest
from rich.console import Console

from tilestack.lab.compile import KernelReport, gate
from tilestack.lab.explain import render_explain

WALK = """
import json, sys
import torch
from tilestack.lab.explain import explain, telling_cases
from tilestack.contract import operators
if sys.argv[1] != "90":
    for described in operators():
        described.cases = telling_cases(described)[-1:]
dtypes = [getattr(torch, name) for name in sys.argv[2].split(",")]
reports = explain(capability=int(sys.argv[1]), dtypes=dtypes, every_bench=False)
print(json.dumps([report.row() for report in reports]))
"""

# Kernels whose spills are known and not yet cured; every other gate holds for them too.
ODD = "rows of odd length give each element an address of its own, and some tiles run out of registers for them"
SPILLS_OWED = {
    "norm_long_fwd_kernel": ODD,
    "norm_long_bwd_kernel": ODD,
    "softmax_bwd_kernel": ODD,
    "group_norm_fwd_kernel": ODD,
    "group_norm_bwd_kernel": "its largest tile is a few registers too many before sm_90",
    "gather_kernel": "a few bytes on sm_100, in the smallest case",
    "attention_bwd_kernel": "addresses that never change are fetched again in each step, beside two sums of 64 registers each",
    "matmul_kernel": "ptxas spills a few bytes of the float32 tiles below the register limit",
}


def owed(report: KernelReport) -> bool:
    return report.kernel in SPILLS_OWED and all(reason.startswith("spills") for reason in gate(report))


@pytest.mark.parametrize(("capability", "dtypes"), [(80, "bfloat16"), (90, "bfloat16,float32"), (100, "bfloat16")])
def test_kernels_pass_the_gates(uninterpreted, capability, dtypes):
    rows = uninterpreted("-c", WALK, str(capability), dtypes)
    reports = [KernelReport(**{n: v for n, v in row.items() if n != "failures"}, ptx="") for row in rows]
    assert {"forward", "backward"} == {report.direction for report in reports}
    assert set(dtypes.split(",")) == {report.dtype for report in reports}
    failing = [report for report in reports if gate(report)]
    unexpected = [report for report in failing if not owed(report)]
    if unexpected:
        console = Console(width=200)
        with console.capture() as table:
            console.print(render_explain(unexpected))
        pytest.fail(table.get(), pytrace=False)
    if failing:
        pytest.xfail("; ".join(f"{kernel}: {SPILLS_OWED[kernel]}" for kernel in sorted({r.kernel for r in failing})))
