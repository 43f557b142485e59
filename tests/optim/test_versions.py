"""What kernels write in place autograd hears of: whoever differentiates through a stepped weight is told, as by torch."""

import pytest
import torch

from tilestack import optim

MAKERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "muon": lambda params: optim.Muon(params, lr=0.1, ns_dtype=torch.float32),
    "adamw8bit": lambda params: optim.AdamW8bit(params, lr=0.1, min_8bit_size=64),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_stepped_weight_cannot_be_differentiated_through(path, make):
    weights = [torch.nn.Parameter(torch.randn(80)), torch.nn.Parameter(torch.randn(8, 6).t())]
    optimizer = make(weights)
    for _ in range(2):
        losses = [weight.square().sum() for weight in weights]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        versions, gradients = ([t._version for t in some] for some in (weights, [w.grad for w in weights]))
        optimizer.step()
        assert all(weight._version > before for weight, before in zip(weights, versions, strict=True))
        assert [weight.grad._version for weight in weights] == gradients
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_clipped_gradients_are_known_to_be_written(path):
    weight = torch.nn.Parameter(torch.ones(5))
    weight.grad = torch.ones(5)
    weight.grad.requires_grad_()  # as in a gradient penalty
    penalty = weight.grad.square().sum()
    optim.clip_grad_norm_([weight], 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
