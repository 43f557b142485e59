"""What a call costs on the host: every operator can be called in the ways that are timed."""

import pytest
import torch

from tilestack import ops
from tilestack.lab import bench_host


@pytest.mark.parametrize("op", [op for op in ops.operators() if op.outputs and not op.mutates], ids=lambda op: op.name)
def test_every_operator_has_ways_to_be_called(op):
    found = bench_host.ways(op, bench_host.smallest(op), "torch", "cpu")
    assert "no_grad" in found
    has_floats = any(
        isinstance(value, torch.Tensor) and value.is_floating_point()
        for value in bench_host.smallest(op).build(bench_host.Make(torch.bfloat16)).values()
    )
    assert has_floats or list(found) == ["no_grad"]
