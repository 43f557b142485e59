"""Attention over 131,072 tokens: it runs, it is right, and its memory grows as its inputs do."""

import gc

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.cases import Make

SHORT, LONG = 16_384, 131_072
MOST = LONG / SHORT + 0.5  # what does not grow with the rows, and pieces that allocators round


@pytest.fixture(params=["gluon:own", "triton", "aten"])
def chosen(request):
    if "gluon" in request.param and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernels are for Hopper, which this GPU is not")
    with backend(attention=request.param):
        yield request.param


def inputs(length):
    make = Make(torch.bfloat16, "cuda")
    return [make.normal(1, length, heads, 128).requires_grad_() for heads in (4, 1, 1)]


def step(leaves):
    out = ops.attention(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


def peak_of_a_step(length):
    """Bytes that a forward and a backward need beyond their inputs, results included."""
    leaves = inputs(length)
    step(leaves)  # compiles, and makes the workspaces that persist
    gc.collect()  # gradients that compiling left in a cycle would be freed within the step that is measured
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(leaves)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_the_rows_and_not_with_their_square(chosen):
    if chosen == "aten":
        pytest.skip("cuDNN takes other kernels for longer rows, which need 1.2 times as much for each")
    short, long = peak_of_a_step(SHORT), peak_of_a_step(LONG)
    assert short > 0
    assert long <= MOST * short, (
        f"{short} bytes for {SHORT} tokens, {long} for {LONG}: {long / short:.1f} times as many"
    )


def test_the_last_queries_and_their_gradients_are_right(chosen):
    """The definition sees all keys too, but of few queries; the gradient arrives at these alone."""
    few, leaves = 8, inputs(LONG)
    arriving = Make(torch.bfloat16, "cuda", seed=1).normal(1, few, 4, 128)
    results = []
    for name in (chosen, "torch"):
        with backend(attention=name):
            q = leaves[0] if name == chosen else leaves[0][:, -few:]
            out = ops.attention(q, *leaves[1:])[:, -few:]
            results.append([out, *torch.autograd.grad(out, leaves, arriving)])
    for name, found, expected in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        distance = (found.double() - expected.double()).norm() / expected.double().norm()
        assert distance < 2**-7, f"{name} is off by {distance:.2e} of its norm"
