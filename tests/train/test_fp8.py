"""Experts in fp8: the three products of a mixture, beside adapters, under a compiler and recomputed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilestack import nn
from tilestack.nn.lora import ExpertLoRA, add_lora, lora_parameters
from tilestack.train import fp8


class Model(torch.nn.Module):
    def __init__(self, intermediate=48):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([nn.MoE(32, intermediate, experts=4, top_k=2, shared_intermediate=16)])

    def forward(self, x):
        return self.layers[0](x)


def in_fp8(**sizes):
    model = Model(**sizes)
    fp8.compute_in_fp8(model)
    return model


def tokens():
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(model, x, run=None):
    out = model(x) if run is None else run(x)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(out, [x, *wanted], torch.ones_like(out), allow_unused=True)
    return [out, *grads]


def apart(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def test_experts_follow_their_layer_as_closely_as_the_format_allows():
    exact, coded = gradients(Model(), tokens()), gradients(in_fp8(), tokens())
    assert all(found.dtype == truth.dtype for found, truth in zip(coded[1:], exact[1:], strict=True))
    differences = [apart(found, truth) for found, truth in zip(coded, exact, strict=True)]
    assert 0 < max(differences) < 2**-3  # e4m3 has 3 bits after the point, and errors average out
    assert not torch.equal(coded[0].float(), exact[0])


def test_experts_beside_an_adapter_are_frozen_and_it_learns():
    model = Model()
    add_lora(model, ["layers.*.gate_up", "layers.*.down"], rank=4)
    fp8.compute_in_fp8(model)
    assert sum(isinstance(module, ExpertLoRA) for module in model.modules()) == 2
    model(tokens()).square().sum().backward()
    assert model.layers[0].gate_up.grad is None
    assert all(parameter.grad is not None for _, parameter in lora_parameters(model))


@pytest.mark.parametrize(
    "around",
    [
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    ],
    ids=["compiled", "recomputed"],
)
def test_compiled_and_recomputed_experts_are_the_same(around):
    model = in_fp8()
    plain, found = gradients(model, tokens()), gradients(model, tokens(), around(model))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_sizes_that_tensor_cores_do_not_take_stay_as_they_are():
    model = in_fp8(intermediate=40)  # two of 40 are a multiple of 16, one is not
    assert "base_product" not in vars(model.layers[0])
    assert "forward" in vars(model.layers[0].shared.down)


def test_no_tokens_are_no_error():
    assert in_fp8()(torch.empty(0, 32)).shape == (0, 32)
