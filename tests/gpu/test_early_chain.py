"""A chain of kernels that begin before the one in front has ended computes what kernels one after the other compute."""

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.registry import forget_plans
from tilestack.kernels import early

HIDDEN, UNITS, LAYERS = 512, 1024, 12
CHAIN = "add_rms_norm=triton,linear_swiglu=triton_split_k,linear="


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
    return [(draw(2 * UNITS, HIDDEN), draw(HIDDEN, UNITS), draw(HIDDEN) + 1) for _ in range(LAYERS)]


def chain(x, weights):
    residual = torch.zeros_like(x)
    for gate_up, down, norm in weights:
        normal, residual = ops.add_rms_norm(x, residual, norm, 1e-6)
        x = ops.linear(ops.linear_swiglu(normal, gate_up), down)
    return x + residual


def in_a_graph(x, weights):
    for _ in range(3):
        chain(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, weights)
    return graph, out


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_overlap_changes_no_bit(weights, rows, monkeypatch):
    inputs = torch.randn(50, rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen = CHAIN + ("triton_gemv" if rows <= 4 else "triton_split_k")
    with torch.no_grad(), backend(chosen):
        assert early.begins_early(inputs.device) == (torch.cuda.get_device_capability()[0] >= 9)
        given = inputs[0].clone()
        graph, out = in_a_graph(given, weights)
        overlapped = []
        for x in inputs:
            given.copy_(x)
            graph.replay()
            overlapped.append(out.clone())
        eager = [chain(x, weights) for x in inputs]
    with torch.no_grad(), backend(chosen):
        monkeypatch.setattr(early, "begins_early", lambda device: False)
        forget_plans()
        in_turn = [chain(x, weights) for x in inputs]
    forget_plans()
    for name, found in dict(graph=overlapped, eager=eager).items():
        assert all(map(torch.equal, found, in_turn)), name


def test_weights_written_by_the_kernel_in_front_are_seen(weights):
    x = torch.randn(8, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), backend("linear=triton_split_k"):
        weight = torch.empty(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
        for number in range(100):
            weight.fill_(number)
            found = ops.linear(x, weight)
            assert torch.equal(found, ops.linear(x, torch.full_like(weight, number)))
