"""A chain of kernels that begin before the one in front has ended computes what kernels one after the other compute."""

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.registry import forget_plans
from tilestack.kernels import early

HIDDEN, UNITS, LAYERS = 512, 1024, 12
WAYS = {  # rows, and what takes their products
    "one row": (1, "linear_swiglu=triton_split_k,linear=triton_gemv"),
    "three rows": (3, "linear_swiglu=triton_split_k,linear=triton_gemv"),
    "eight rows": (8, "linear_swiglu=triton_split_k,linear=triton_split_k"),
    "64 rows": (64, "linear_swiglu=triton_split_k,linear=triton_split_k"),
    "64 rows, weights first": (64, "linear_swiglu=triton_split_k,linear=gluon_few_rows"),
}


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
    return [(draw(2 * UNITS, HIDDEN), draw(HIDDEN, UNITS), draw(HIDDEN) + 1) for _ in range(LAYERS)]


def chain(x, weights, between=lambda: None):
    residual = torch.zeros_like(x)
    for gate_up, down, norm in weights:
        normal, residual = ops.add_rms_norm(x, residual, norm, 1e-6)
        between()
        gated = ops.linear_swiglu(normal, gate_up)
        between()
        x = ops.linear(gated, down)
        between()
    return x + residual


def in_a_graph(x, weights):
    for _ in range(3):
        chain(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, weights)
    return graph, out


@pytest.mark.parametrize("way", WAYS)
def test_overlap_changes_no_bit(weights, way, monkeypatch):
    rows, products = WAYS[way]
    inputs = torch.randn(50, rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen = f"add_rms_norm=triton,{products}"
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
        waited = [chain(x, weights, torch.cuda.synchronize) for x in inputs]
    with torch.no_grad(), backend(chosen):
        monkeypatch.setattr(early, "begins_early", lambda device: False)
        forget_plans()
        in_turn = [chain(x, weights) for x in inputs]
    forget_plans()
    for name, found in dict(graph=overlapped, eager=eager, waited=waited).items():
        assert all(map(torch.equal, found, in_turn)), name


@pytest.mark.parametrize("way", ["triton_split_k", "gluon_few_rows"])
def test_weights_written_by_the_kernel_in_front_are_seen(way):
    x = torch.randn(8, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), backend(f"linear={way}"):
        weight = torch.empty(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
        for number in range(100):
            weight.fill_(number)
            found = ops.linear(x, weight)
            assert torch.equal(found, ops.linear(x, torch.full_like(weight, number)))
