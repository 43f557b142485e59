"""Every kernel of the registry, forward and backward, compiles for GPUs that are not here and passes the gates.

On sm_90 in all cases that tell something; on the others in one of each operator, for time.
"""

import pytest
from rich.console import Console

from tilestack.lab.compile import KernelReport, gate, spills_no_longer_owed
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


@pytest.mark.parametrize(("capability", "dtypes"), [(80, "bfloat16"), (90, "bfloat16,float32"), (100, "bfloat16")])
def test_kernels_pass_the_gates(uninterpreted, capability, dtypes):
    rows = uninterpreted("-c", WALK, str(capability), dtypes)
    reports = [KernelReport(**{n: v for n, v in row.items() if n != "failures"}, ptx="") for row in rows]
    assert {"forward", "backward"} == {report.direction for report in reports}
    assert set(dtypes.split(",")) == {report.dtype for report in reports}
    failing = [report for report in reports if gate(report)]
    if failing:
        console = Console(width=200)
        with console.capture() as table:
            console.print(render_explain(failing))
        pytest.fail(table.get(), pytrace=False)
    unneeded = [entry for entry in spills_no_longer_owed(reports) if entry.endswith(f"sm_{capability}")]
    assert not unneeded, "these spill no longer: strike them off SPILLS_OWED in lab/compile.py"
