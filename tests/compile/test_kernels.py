"""Every kernel of the registry, forward and backward, compiles for GPUs that are not here and passes the gates.

On sm_90 in a cover of all launches in all cases that tell something, on the others in the largest launch of each kernel, for
time. With TILESTACK_COMPILE=all, which `make gates` sets, in all launches on sm_90 and in a cover on the others.
"""

import os

import pytest
from rich.console import Console

from tilestack import ops
from tilestack.lab.compile.absent_gpu import KernelReport, gate
from tilestack.lab.compile.explain import render_explain
from tilestack.lab.compile.spills import OLDER, SPILLS_OWED, spills_no_longer_owed

EVERYTHING = os.environ.get("TILESTACK_COMPILE") == "all"
FAMILIES = dict(
    attention=("attention", "flex_attention", "kv_write", "paged", "paged_codes", "quantised_attention", "rope"),
    matmul=("conv", "fused_linear", "gram", "grouped", "grouped_fp8", "matmul", "quantised_linear")
    + ("grouped_weight_only", "weight_only"),
)
"""The files in ops/ that take the compiler longest; all others are tried together."""

WALK = """
import json, sys
import torch
from tilestack.contract import operator_named
from tilestack.lab.compile.sample import compile_cover, compile_largest, owing, walk
from tilestack.lab.compile.explain import calls_of, compile_all
capability, how, dtypes, *names = sys.argv[1:]
dtypes = [getattr(torch, name) for name in dtypes.split(",")]
calls = calls_of([operator_named(name) for name in names], int(capability), dtypes, every_bench=False)
walked = walk(calls)
reports = dict(cover=compile_cover, largest=compile_largest, all=lambda _: compile_all(calls))[how](walked)
kernels = sorted({launch.kernel for _, launches in walked for launch in launches})
owing = [launch.kernel for launch in owing(walked)]
print(json.dumps(dict(walked=kernels, owing=owing, rows=[report.row() for report in reports])))
"""


def names_of(family: str) -> list[str]:
    """The operators of one of FAMILIES, of none of them (`others`), or all."""
    among = lambda operator: next((name for name, files in FAMILIES.items() if operator.family in files), "others")
    return [operator.name for operator in ops.operators() if family in ("all", among(operator))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "family"), [(90, "others"), (90, "matmul"), (90, "attention"), (100, "all"), (80, "all")]
)
def test_kernels_pass_the_gates(uninterpreted, capability, family):
    if EVERYTHING and OLDER:
        pytest.skip("what kernels spill with an older Triton is known of the cover alone: install the newest for this")
    names, dtypes = names_of(family), ("bfloat16", "float32") if capability == 90 else ("bfloat16",)
    how = ("all" if EVERYTHING else "cover") if capability == 90 else ("cover" if EVERYTHING else "largest")
    found = uninterpreted("-c", WALK, str(capability), how, ",".join(dtypes), *names)
    reports = [KernelReport(**{n: v for n, v in row.items() if n != "failures"}, ptx="") for row in found["rows"]]
    assert {report.kernel for report in reports} == set(found["walked"])
    assert {"forward", "backward"} == {report.direction for report in reports}
    assert set(dtypes) == {report.dtype for report in reports}
    failing = [report for report in reports if gate(report)]
    if failing:
        console = Console(width=200)
        with console.capture() as table:
            console.print(render_explain(failing))
        pytest.fail(table.get(), pytrace=False)
    owed = {kernel for kernel, owed in SPILLS_OWED.items() if capability in owed.most and owed.where[0] in names}
    assert set(found["owing"]) == owed, "where SPILLS_OWED says that a kernel spills most, it is no longer launched"
    unneeded = spills_no_longer_owed({report.kernel for report in reports if report.spill_bytes}, capability, names)
    assert not unneeded, "these spill no longer: strike them off SPILLS_OWED in lab/compile/spills.py"
