"""Calls with a gradient on a GPU, in Python and in C++: repeated ones, whose backward runs in a thread of autograd's own."""

import pytest
import torch

from tilestack import ops
from tilestack.contract import autograd, backend, registry
from tilestack.contract.native import build


@pytest.fixture(scope="module")
def node():
    try:
        return build.load(build.build_node())
    except build.NodeBuildError as reason:
        pytest.skip(str(reason))


def three_layers(x, weight):
    for _ in range(3):
        x = ops.softmax(ops.silu(ops.rms_norm(x, weight)))
    return x


def test_repeated_calls_give_the_bits_they_give_through_python(node, monkeypatch):
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    found = []
    for module in (None, node):
        monkeypatch.setattr(autograd, "native_node", lambda: module)
        registry.forget_plans()
        with backend("triton"):
            for _ in range(5):
                out = three_layers(x, weight)
                assert (type(out.grad_fn).__module__ == "tilestack_node") == (module is not None)
                found.append(torch.autograd.grad(out, (x, weight), grad))
    registry.forget_plans()
    for dx, dweight in found:
        assert torch.equal(dx, found[0][0])
        assert torch.equal(dweight, found[0][1])


def test_memory_is_free_once_a_backward_is_done(node, monkeypatch):
    """What is kept goes as soon as it was used, so that a step takes no more memory than it does through Python."""
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    peaks, left = [], []
    for module in (None, node):
        monkeypatch.setattr(autograd, "native_node", lambda: module)
        registry.forget_plans()
        with backend("triton"):
            for _ in range(4):  # the last of which is repeated
                torch.cuda.reset_peak_memory_stats()
                three_layers(x, weight).sum().backward()
                x.grad = weight.grad = None
                torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        left.append(torch.cuda.memory_allocated())
    registry.forget_plans()
    assert peaks[1] <= peaks[0]
    assert left[1] <= left[0]
