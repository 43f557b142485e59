"""What a layer reads is computed again for its backward: less is kept, and not a bit of the gradients changes."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilestack import nn, ops
from tilestack.nn import moe
from tilestack.nn.recompute import not_keeping


def keeping(block, x):
    """The block's gradients with everything kept, as PyTorch does by itself."""
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        return torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])


def mixture():
    torch.manual_seed(0)
    return nn.MoE(16, 24, experts=4, top_k=2), torch.randn(3, 5, 16, requires_grad=True)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_gradients_have_the_same_bits(chosen):
    block, x = mixture()
    with ops.backend(chosen):
        expected = keeping(block, x)
        out = block(x).square().sum()
    found = torch.autograd.grad(out, [x, *block.parameters()])  # outside: the backend of the forward counts
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_the_gated_pair_is_gone_after_the_forward(monkeypatch):
    made = []

    def noted(*arguments):
        made.append(weakref.ref(result := ops.swiglu(*arguments)))
        return result

    others = {name: staticmethod(getattr(ops, name)) for name in ("gather_rows", "grouped_linear", "scatter_rows")}
    monkeypatch.setattr(moe, "ops", type("Ops", (), {"swiglu": staticmethod(noted), **others}))
    monkeypatch.setattr(moe, "not_keeping", lambda result, _, *arguments: not_keeping(result, ops.swiglu, *arguments))
    block, x = mixture()
    with ops.backend("triton"):  # the definition reads the pair expert by expert, and keeps these views of it
        out = block(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            kept = block(x)
    assert [pair() is None for pair in made] == [True, False]
    for result in (out, kept):
        result.sum().backward()
    assert x.grad.abs().sum() > 0


def test_activation_checkpointing_keeps_less_still():
    block, x = mixture()
    found = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), [x, *block.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, keeping(block, x), strict=True))
