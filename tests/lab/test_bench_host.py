"""What a call costs on the host: every operator can be called in the ways that are timed."""

import pytest
import torch

from tilestack import ops
from tilestack.lab import bench_host
from tilestack.lab.explain import elements


@pytest.mark.parametrize("op", [op for op in ops.operators() if op.outputs and not op.mutates], ids=lambda op: op.name)
def test_every_operator_has_ways_to_be_called(op):
    case = bench_host.smallest(op)
    assert elements(case) <= bench_host.SMALL
    found = bench_host.ways(op, case, "torch", "cpu")
    assert "no_grad" in found
    arguments = case.build(bench_host.Make(torch.bfloat16)).values()
    assert any(map(bench_host.is_float, arguments)) or list(found) == ["no_grad"]
