"""What differs for a row alone and the same row among others, a stride, must not make another kernel of it."""

import pytest

COMPILE = """
import json, sys
import torch
from tilestack.contract import operator_named
from tilestack.contract.cases import Make
from tilestack.lab.compile.absent_gpu import AbsentGpu
operator = operator_named("flex_attention")
implementation = operator.implementations["triton"]
(case,) = (case for case in operator.cases if case.name == sys.argv[1])
arguments = operator.bind(**case.build(Make(torch.float16, "meta")))
bias = arguments["bias"]
alone = arguments | {name: arguments[name][:1] for name in ("q", "k", "v", "bias")}
shared = arguments | dict(bias=bias[:1])
found = []
for given in (arguments, alone, shared, shared | {name: alone[name] for name in ("q", "k", "v")}):
    with AbsentGpu(90) as gpu, torch.no_grad():
        implementation.forward(*given.values())
    found.append(sorted(gpu.launched))
print(json.dumps(found))
"""


@pytest.mark.parametrize("case", ["2x130x200x2x2x80x80xbias_of_keys", "2x90x150x2x1x64x64xbias"])
def test_a_row_alone_runs_the_kernel_that_it_runs_in_a_batch(uninterpreted, case):
    together, alone, shared, shared_alone = uninterpreted("-c", COMPILE, case)
    assert together
    assert together == alone == shared == shared_alone
