"""Attention on Hopper under torch.compile: the backend that is taken without, its sums kept for its own backward."""

import pytest
import torch

from tilestack import backend, ops
from tilestack.kernels.hopper import attention as hopper


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiled_training_has_the_gradients_of_eager(dim, documents, as_good_as, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("attention in Gluon is for Hopper")
    torch.manual_seed(0)
    draw = lambda heads: torch.randn(2, 384, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves, arriving = [draw(4), draw(2), draw(2)], torch.randn(2, 384, 4, dim, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 130, 384, 768], dtype=torch.int32, device="cuda") if documents else None
    made, gradients = [], hopper.gradients
    monkeypatch.setattr(hopper, "gradients", lambda *given: made.append("gradients") or gradients(*given))

    def trained(attention, tensors):
        out = attention(*tensors, ends)
        return [out, *torch.autograd.grad(out, tensors, arriving.to(out.dtype))]

    torch.compiler.reset()
    with backend(attention="gluon"):
        eager = trained(ops.attention, leaves)
        compiled = trained(torch.compile(lambda q, k, v, ends: ops.attention(q, k, v, ends), fullgraph=True), leaves)
    assert made == ["gradients"] * 2
    truth = trained(ops.attention.definition, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for results in zip(compiled, eager, truth, strict=True):
        as_good_as(*results)
