"""Attention in float64, which gradcheck asks for, compiles where Triton multiplies it on tensor cores.

There Triton fails (`fp64 don't support largeK MMA`) if a factor of `tl.dot` was made from anything narrower than 32 bits, as
weights are that a mask of bytes hides. No other format and no interpreter shows that. Registers may spill: nobody waits for
float64.
"""

WALK = """
import json
import torch
from tilestack.contract import operator_named
from tilestack.contract.backends import family_of
from tilestack.contract.cases import Make
from tilestack.lab.compile.absent_gpu import Call, compiled_kernels

def tensors_given(case):
    return sum(isinstance(value, torch.Tensor) for value in case.build(Make(device="meta")).values())

rows = []
for name in ("attention", "flex_attention", "paged_attention"):
    operator = operator_named(name)
    small = [case for case in operator.cases if case.kind == "check"]
    for backend, implementation in operator.implementations.items():
        if family_of(backend) == "triton":
            for direction in ("forward", "backward"):
                in_order = sorted(small, key=tensors_given, reverse=True)
                calls = (Call(operator, implementation, case, torch.float64, direction, 90) for case in in_order)
                rows += [report.row() for report in next(filter(None, map(compiled_kernels, calls)), [])]
print(json.dumps(rows))
"""


def test_kernels_compile_with_all_that_a_call_can_give(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert {row["dtype"] for row in rows} == {"float64"}
    compiled = {(row["operator"], row["backend"], row["direction"]) for row in rows}
    assert compiled == {
        ("attention", "triton", "forward"),
        ("attention", "triton", "backward"),
        ("attention", "triton_standard", "forward"),
        ("attention", "triton_blocked", "forward"),
        ("flex_attention", "triton", "forward"),
        ("flex_attention", "triton", "backward"),
        ("paged_attention", "triton", "forward"),
    }
    assert any(row["operator"] == "flex_attention" and row["constants"].get("BLOCK_Q") for row in rows)
