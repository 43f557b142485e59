"""The feed-forward layer: one operator from its gated pair on, unless its second projection is no plain layer any more."""

import pytest
import torch

from tilestack import contract, nn
from tilestack.nn import mlp


def layer(bias=False):
    torch.manual_seed(0)
    return nn.MLP(16, 24, bias).double(), torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)


def by_hand(block, x):
    gate, up = block.gate_up(x).chunk(2, -1)
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, block.down.weight, block.down.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_it_is_a_gated_pair_between_two_projections(chosen, bias):
    block, x = layer(bias)
    wanted = [x, *block.parameters()]
    with contract.backend(chosen):
        found = block(x)
        gradients = torch.autograd.grad(found.square().sum(), wanted)
    expected = by_hand(block, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), wanted))


def test_the_gated_pair_is_not_kept():
    block, x = layer()
    kept = []
    with (
        contract.backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t),
    ):
        block(x)
    assert torch.Size([2, 3, 48]) in kept
    assert not any(24 in shape and 16 not in shape for shape in kept)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chosen", ["torch", "triton", "linear_swiglu=triton_split_k"])
def test_few_rows_without_gradients_gate_within_the_first_projection(chosen, bias, monkeypatch):
    block, x = layer(bias)
    joint, rows = mlp.ops.linear_swiglu, []
    monkeypatch.setattr(mlp.ops, "linear_swiglu", lambda x, *rest: rows.append(x.shape[:-1]) or joint(x, *rest))
    with torch.no_grad(), contract.backend(chosen):
        torch.testing.assert_close(block(x[:1]), by_hand(block, x[:1]))
        many = torch.randn(mlp.FEW + 1, 16, dtype=torch.float64)
        torch.testing.assert_close(block(many), by_hand(block, many))
    assert rows == [(1, 3)]
    block.gate_up.register_forward_hook(lambda *_: rows.append("listened to"))
    with torch.no_grad():
        block(x)
    assert rows[1:] == ["listened to"]


@pytest.mark.parametrize("what", ["hook", "forward", "class"])
def test_another_second_projection_is_asked(what):
    block, x = layer()
    calls = []
    if what == "hook":
        block.down.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape))
    elif what == "forward":
        block.down.forward = lambda gated: calls.append(gated.shape) or torch.zeros(2, 3, 16)
    else:
        block.down = torch.nn.Sequential(torch.nn.Identity())
        block.down.register_forward_hook(lambda module, given, out: calls.append(out.shape))
    block(x)
    assert calls == [torch.Size([2, 3, 24])]


def test_it_compiles_whole():
    block, x = layer()
    found = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(x).square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(block(x).square().sum(), x))


def test_untouched_means_nothing_but_a_linear_layer():
    assert mlp.is_untouched(nn.Linear(2, 2))
    assert not mlp.is_untouched(torch.nn.Linear(2, 2))
